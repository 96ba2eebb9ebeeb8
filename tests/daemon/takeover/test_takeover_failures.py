"""Takeovers that are refused or given up, and either daemon killed on the way."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.daemon.takeover.new_daemon import OldDaemon
from cachesvc.daemon.takeover.process_handle import ProcessHandle
from cachesvc.daemon.takeover.wire import PROTOCOL, SOCKET, MessageKind, receive, receive_state, send
from cachesvc.v1 import takeover_pb2 as pb
from testbed import WAIT_S
from tests.support.takeover import (
    LOADING,
    STEPS,
    epochs,
    opened,
    read,
    stored,
    taken_over,
)
from tests.support.training.jobs import Node, Records, Trainer, exactly_once, fetched
from tests.support.users import as_user
from tests.support.waiting import wait_until

KILLS = 12
NO_USER = 65534


def refused(node: Node, *more: str, code: int = 2) -> str:
    """Start a daemon that cannot take over; return its log."""
    before = len(node.daemon.log)
    assert node.daemon.spawn("--takeover", *more).wait(WAIT_S) == code
    return node.daemon.log[before:]


@pytest.mark.slow
def test_a_new_daemon_that_cannot_start_leaves_the_old_one_as_it_was(tmp_path: Path, own: Node) -> None:
    node, records = own, stored(own)
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    assert "give --state-dir" in refused(node, "--state-dir", str(tmp_path / "other"))
    assert "is no directory" in refused(
        node, "--nvme", f"{tmp_path / 'none'}=50%"
    )  # detected after the old daemon's loop has stopped
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for option in ("--metrics", "--listen", "--advertise"):
            member = ["--cluster", f"static:{address}"] if option == "--advertise" else []
            assert f"{option} {address} cannot be bound" in refused(node, option, address, *member, code=15)
    read(grants, records.rows)
    assert not grants.connect()
    assert fetched(node) == records.rows.nbytes
    taken_over(node)
    read(grants, records.rows)
    assert fetched(node) == records.rows.nbytes
    grants.close()


def test_a_new_daemon_that_cannot_read_what_jobs_read_leaves_the_old_one_as_it_was(
    node: Node, records: Records
) -> None:
    dataset = opened(node, records)
    grants = DaemonGrants(node.daemon.socket_dir, dataset)
    read(grants, records.rows)
    of_another_release = node.daemon.root / "state/catalogs" / f"{dataset}.lmdb"
    of_another_release.write_bytes(b"nobody reads this")
    assert f"jobs read version {dataset}, whose catalog this daemon cannot read (" in refused(node)
    read(grants, records.rows)
    assert not grants.connect()
    grants.close()
    wait_until(lambda: not readers(node))
    taken_over(node)
    of_another_release.unlink()
    assert opened(node, records) == dataset  # indexed again from the extents in RAM
    assert fetched(node) == records.rows.nbytes


def readers(node: Node) -> int:
    with Control(node.daemon.socket_dir) as control:
        return control.status().readers


def greeting(node: Node, protocol: int = PROTOCOL) -> tuple[socket.socket, Any]:
    """Play the new daemon up to the old one's offer."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(WAIT_S)
    channel.connect(f"{node.daemon.socket_dir}/{SOCKET}")
    send(channel, MessageKind.HELLO, pb.TakeoverHello(protocol=protocol, version="a later one"))
    offer = pb.TakeoverOffer()
    for fd in receive(channel, MessageKind.OFFER, offer):
        os.close(fd)
    return channel, offer


def leave_at_once(channel: socket.socket) -> None:
    """Give up before the old daemon's loop stops."""


def leave_in_the_middle(channel: socket.socket) -> None:
    send(channel, MessageKind.READY)
    (body,) = receive(channel, MessageKind.STATE)
    os.close(body)
    send(channel, MessageKind.GOT)
    for fd in receive(channel, MessageKind.MORE):
        os.close(fd)


def leave_with_everything(channel: socket.socket) -> None:
    send(channel, MessageKind.READY)
    for fd in receive_state(channel, pb.TakeoverState()):
        os.close(fd)


@pytest.mark.parametrize("leave", [leave_at_once, leave_in_the_middle, leave_with_everything])
def test_the_old_daemon_goes_on_when_the_new_one_leaves(
    node: Node, records: Records, leave: Callable[[socket.socket], None]
) -> None:
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows, 0, 1)
    channel, _ = greeting(node)
    with channel:
        leave(channel)
    read(grants, records.rows)  # cached extents, and others that must be filled
    assert not grants.connect()
    assert fetched(node) == records.rows.nbytes
    grants.close()


def test_another_protocol_is_refused_with_a_reason(node: Node, records: Records) -> None:
    channel, offer = greeting(node, PROTOCOL + 1)
    channel.close()
    assert f"protocol {PROTOCOL}" in offer.refused
    assert "a later one" in offer.refused


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_answered(node: Node) -> None:
    here = Path(node.daemon.socket_dir)
    path = here / SOCKET
    assert path.stat().st_mode & 0o777 == 0o600

    def knock() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.settimeout(WAIT_S)
            channel.connect(str(path))
            with contextlib.suppress(BrokenPipeError):
                send(channel, MessageKind.HELLO, pb.TakeoverHello(protocol=PROTOCOL))
            with contextlib.suppress(ConnectionResetError):  # closed with the greeting unread
                return channel.recv(1) == b""
            return True

    os.chmod(here, 0o711)
    os.chmod(path, 0o666)
    try:
        assert as_user(NO_USER, knock)
    finally:
        os.chmod(path, 0o600)
        os.chmod(here, 0o700)
    assert "a takeover is refused" in node.daemon.log


@pytest.mark.slow
def test_an_old_daemon_that_dies_before_its_offer_is_replaced_by_a_cold_one(own: Node) -> None:
    node, records = own, stored(own)
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    old = node.daemon.process
    assert old is not None
    old.send_signal(signal.SIGSTOP)
    node.daemon.process = node.daemon.spawn("--takeover")
    wait_until(lambda: waits_for_an_answer(node))
    old.kill()
    old.wait()
    wait_until(lambda: "died before it handed over" in node.daemon.log)
    wait_until(lambda: Path(f"{node.daemon.socket_dir}/{SOCKET}").stat().st_ino and serves(node))
    wait_until(lambda: grants.connect() or True)
    assert read(grants, records.rows) == {"ram"}
    grants.close()


@pytest.mark.parametrize("told", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("moment", ["not met", "prepares"])
def test_a_new_daemon_that_is_told_to_end_leaves_the_old_one_as_it_was(
    node: Node, records: Records, told: signal.Signals, moment: str
) -> None:
    before = len(node.daemon.log)

    def logged(line: str) -> bool:
        return line in node.daemon.log[before:]

    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    old = node.daemon.process
    assert old is not None
    old.send_signal(signal.SIGSTOP)
    new = node.daemon.spawn("--takeover")
    try:
        wait_until(lambda: logged("asked the daemon that serves here to hand over"))
        if moment == "prepares":
            new.send_signal(signal.SIGSTOP)  # or it would have taken over before the old one is stopped again
            old.send_signal(signal.SIGCONT)
            wait_until(lambda: logged("prepares to take over"))
            old.send_signal(signal.SIGSTOP)
            new.send_signal(signal.SIGCONT)
        new.send_signal(told)
        assert new.wait(WAIT_S) in (-told, 130)
    finally:
        new.kill()
        old.send_signal(signal.SIGCONT)
    read(grants, records.rows)
    assert not grants.connect(), "the connection is the old one"
    assert fetched(node) == records.rows.nbytes
    grants.close()


def test_the_log_does_not_claim_what_a_dead_daemon_held(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(["sleep", "60"]) as old:
        before = OldDaemon(ours, ProcessHandle(old.pid), pb.TakeoverOffer(), lock=-1)
        theirs.close()
        old.kill()
        assert before.hand_over().listener is None
        before.adopted()
    (said,) = caplog.messages
    assert said == "the old daemon died before it handed over; starting without what it held"


def waits_for_an_answer(node: Node) -> bool:
    """Tell whether a connection waits at the old daemon's takeover socket."""
    listed = Path("/proc/net/unix").read_text().splitlines()
    return sum(line.endswith(f"{node.daemon.socket_dir}/{SOCKET}") for line in listed) > 1


def serves(node: Node) -> bool:
    assert node.daemon.process is not None
    return f"pid={node.daemon.process.pid}" in node.daemon.log.rpartition("INFO serving")[2]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("victim", ["old", "new"])
def test_either_daemon_killed_at_a_random_moment(tmp_path: Path, own: Node, victim: str) -> None:
    node, records = own, stored(own)
    rng, env, enough = random.Random(7), node.daemon.env | {"CACHESVC": "require"}, threading.Event()
    with (
        Trainer(tmp_path / "rank", records.uri, LOADING | {"num_workers": 2}, env) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        exactly_once(trainer.take(STEPS), records.rows)
        trainer.said()
        counted = pool.submit(epochs, trainer, records.rows, enough)
        try:
            for _ in range(KILLS):
                kill_one(node, victim, rng.uniform(0.3, 1.6))
        finally:
            enough.set()
        assert counted.result(WAIT_S)


def kill_one(node: Node, victim: str, after_s: float) -> None:
    """Kill one of the two daemons during a takeover; the other one serves, or a new one is started."""
    old = node.daemon.process
    new = node.daemon.spawn("--takeover")
    assert old is not None
    hit, other = (old, new) if victim == "old" else (new, old)
    try:
        hit.wait(after_s)  # a random moment, not a wait for an event
    except subprocess.TimeoutExpired:
        hit.kill()
    hit.wait()
    node.daemon.process = other
    if victim == "new" and not_serving(other):
        node.daemon.start()
    wait_until(lambda: serves(node))


def not_serving(process: subprocess.Popen[bytes]) -> bool:
    """Tell whether the old daemon had handed over everything and ended."""
    try:
        return process.wait(2.0) == 0
    except subprocess.TimeoutExpired:
        return False
