"""The parent process: it keeps the memory of copies through crashes of the daemon, and ends with what it should."""

from __future__ import annotations

import os
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.config import PARENT_SOCKET
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import ExtentId
from cachesvc.daemon.parent.held_copies import HeldCopies
from cachesvc.daemon.parent.messages import (
    COPIES_AT_ONCE,
    PROTOCOL,
    CopyHeld,
    Program,
    Release,
    UpgradeRequest,
    receive_answer,
)
from cachesvc.daemon.processes.datagrams import send
from testbed import WAIT_S
from tests.support.processes import held_memory
from tests.support.takeover import EXTENTS, LOADING, epochs, opened, read, reading, taken_over
from tests.support.training.jobs import Node, Records, Trainer, fetched
from tests.support.users import as_user
from tests.support.waiting import wait_until

NO_USER = 65534
KILLS = 3


def crashed(node: Node) -> None:
    """Kill the daemon, and wait until the next one serves."""
    before = node.daemon.pid
    node.daemon.crash()
    wait_until(lambda: node.daemon.ready() and node.daemon.pid != before)


def test_what_is_in_ram_survives_a_killed_daemon(node: Node, records: Records) -> None:
    with reading(node, records) as grants:
        crashed(node)
        assert node.ram().used_bytes == records.rows.nbytes
        assert read(grants, records.rows) == {"ram"}
        assert fetched(node) == records.rows.nbytes


@pytest.mark.slow
def test_jobs_read_on_while_the_daemon_is_killed_again_and_again(
    tmp_path: Path, node: Node, records: Records
) -> None:
    def filled() -> bool:
        with Control(node.daemon.socket_dir) as control:
            reply = control.status()
        return reply.tiers[0].used_bytes == records.rows.nbytes and not reply.fills_running

    env = node.s3.env(node.proxy.endpoint) | node.daemon.env | {"CACHESVC": "require"}
    enough = threading.Event()
    with (
        Trainer(tmp_path / "rank", records.uri, LOADING | {"num_workers": 2}, env) as trainer,
        ThreadPoolExecutor(1) as pool,
    ):
        exactly = pool.submit(epochs, trainer, records.rows, enough)
        try:
            wait_until(filled)  # fills under way would begin again
            for _ in range(KILLS):
                crashed(node)
        finally:
            enough.set()
        assert exactly.result(WAIT_S)
    assert fetched(node) == records.rows.nbytes


def test_a_daemon_that_is_killed_as_it_starts_is_started_again(own: Node) -> None:
    assert own.daemon.stop() == 0
    own.daemon.launch()
    wait_until(own.daemon.children)
    own.daemon.crash()
    own.daemon.wait_ready()


def test_a_daemon_that_is_told_to_end_ends_the_service(own: Node) -> None:
    os.kill(own.daemon.pid, signal.SIGTERM)
    assert own.daemon.process is not None
    assert own.daemon.process.wait(WAIT_S) == 0


def test_an_evicted_copy_leaves_the_parent_too(node: Node, records: Records) -> None:
    from cachesvc.client.control import Control

    dataset = opened(node, records)
    grants = DaemonGrants(node.daemon.socket_dir, dataset)
    read(grants, records.rows)
    grants.close()
    wait_until(lambda: node.readers() == 0)
    assert node.daemon.process is not None
    before = len(held_memory(node.daemon.process.pid))
    with Control(node.daemon.socket_dir) as control:
        wait_until(lambda: control.evict(dataset).busy_bytes == 0)
    assert len(held_memory(node.daemon.process.pid)) == before - EXTENTS


@pytest.mark.slow
def test_a_killed_parent_takes_its_daemon_with_it(own: Node) -> None:
    own.daemon.kill()
    own.daemon.start()
    assert own.ram().used_bytes == 0


def refused(node: Node, *more: str) -> str:
    """Ask for an upgrade that fails; return the log since."""
    before = len(node.daemon.log)
    assert node.daemon.spawn("--takeover", *more).wait(WAIT_S) == InvalidInput.code
    return node.daemon.log[before:]


@pytest.mark.slow
def test_a_release_that_does_not_start_leaves_the_one_before(
    tmp_path: Path, node: Node, records: Records
) -> None:
    with reading(node, records) as grants:
        before = node.daemon.pid
        assert "cannot hold one extent" in refused(node, "--ram", "64KiB")
        assert node.daemon.pid == before, "found before the old daemon left"
        assert "is no directory" in refused(node, "--nvme", f"{tmp_path / 'none'}=50%")
        wait_until(node.daemon.ready)
        assert read(grants, records.rows) == {"ram"}
        taken_over(node)
        assert read(grants, records.rows) == {"ram"}
        assert fetched(node) == records.rows.nbytes


def asked(node: Node, protocol: int, release: Release) -> tuple[int, str]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
        channel.settimeout(WAIT_S)
        channel.connect(f"{node.daemon.socket_dir}/{PARENT_SOCKET}")
        send(channel, UpgradeRequest(protocol, release))
        received = receive_answer(channel)
    assert received is not None
    return received[0].code, received[0].message


def test_another_protocol_and_a_missing_program_are_refused_with_a_reason(node: Node) -> None:
    release = Release(Program("/nowhere/python", {}, "/"), b"{}")
    code, why = asked(node, PROTOCOL + 1, release)
    assert (code, f"protocol {PROTOCOL}" in why) == (InvalidInput.code, True)
    code, why = asked(node, PROTOCOL, release)
    assert (code, "/nowhere/python" in why) == (InvalidInput.code, True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_is_not_answered(node: Node) -> None:
    here = Path(node.daemon.socket_dir)
    path = here / PARENT_SOCKET
    assert path.stat().st_mode & 0o777 == 0o600

    def knock() -> bool:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as channel:
            channel.settimeout(WAIT_S)
            channel.connect(str(path))
            try:
                return channel.recv(1) == b""
            except ConnectionResetError:
                return True

    os.chmod(here, 0o711)
    os.chmod(path, 0o666)
    try:
        assert as_user(NO_USER, knock)
    finally:
        os.chmod(path, 0o600)
        os.chmod(here, 0o700)


@pytest.mark.pure
def test_batches_hold_every_copy_once_the_last_first() -> None:
    held, count = HeldCopies(), 2 * COPIES_AT_ONCE + 3
    for number in range(count):
        held.hold(
            CopyHeld(ExtentId(number.to_bytes(16, "big")), 10, bytes(8)), os.open(os.devnull, os.O_RDONLY)
        )
    batches = list(held.batches())
    assert max(map(len, batches)) <= COPIES_AT_ONCE
    numbers = [int.from_bytes(copy.extent, "big") for batch in batches for copy, _ in batch]
    assert numbers == list(reversed(range(count)))
    assert held.shed(25) == 30
    assert len(held) == count - 3
    assert next(iter(held))[0].extent == ExtentId((3).to_bytes(16, "big"))
    held.shed(10 * count)
    assert len(held) == 0
    assert msgspec.msgpack.encode(batches[0][0][0])
