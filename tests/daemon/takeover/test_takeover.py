"""`serve --takeover`: one daemon after another under the same readers, and either of them killed on the way."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import signal
import socket
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.catalog.build import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.config import CONTROL_SOCKET, GRANTS_SOCKET
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from cachesvc.daemon.takeover.adoption import Predecessor
from cachesvc.daemon.takeover.takeover import Process
from cachesvc.daemon.takeover.wire import PROTOCOL, SOCKET, Word, receive, receive_state, send
from cachesvc.v1 import takeover_pb2 as pb
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import Fault, Proxy, SeaweedFS, free_ports
from tests.support.faults.disks import mounted
from tests.support.processes import held_memory
from tests.support.training.jobs import Node, Records, Trainer, exactly_once, fetched
from tests.support.users import as_user
from tests.support.waiting import wait_until

EXTENT = 1 << 20
EXTENTS = 8
RECORD = 4096
SAMPLES = EXTENTS * EXTENT // RECORD
BATCH = 64
STEPS = SAMPLES // BATCH
LOADING = {"batch_size": BATCH, "shuffle": True, "window": 2 * EXTENT}
OPTIONS = Options(format="records", record_bytes=RECORD)
PROBED_S = 8.0
"""A lost tier is probed every 5 s."""
TAKEOVERS = 2
KILLS = 12
NOBODY = 65534


def serving(tmp_path: Path, s3: SeaweedFS, proxy: Proxy, *more: str) -> Node:
    bucket = s3.create_bucket(f"takeover-{uuid.uuid4().hex[:8]}")
    options = ["--ram", "32MiB", "--allow", f"s3://{bucket}/", "--extent-bytes", str(EXTENT), *more]
    return Node(Daemon(tmp_path / "node", options, s3.env(proxy.endpoint)), proxy, s3, bucket)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Node]:
    """A line of daemons, each taking over from the one before, that ends well."""
    with Proxy(s3_server.endpoint.removeprefix("http://")) as proxy:
        found = serving(tmp_path_factory.mktemp("line"), s3_server, proxy)
        yield from ending_well(found)


@pytest.fixture
def own(tmp_path: Path, s3_server: SeaweedFS, proxy: Proxy) -> Iterator[Node]:
    """One of a test's own."""
    yield from ending_well(serving(tmp_path, s3_server, proxy))


def ending_well(found: Node) -> Iterator[Node]:
    with found.daemon:
        yield found
        assert found.daemon.stop() == 0, found.daemon.log
        assert "Traceback" not in found.daemon.log
        assert os.listdir(found.daemon.socket_dir) == ["lock"]


@pytest.fixture
def node(shared: Node) -> Node:
    """The shared one."""
    shared.proxy.faults.clear()
    shared.proxy.reset()
    return shared


@pytest.fixture
def records(node: Node) -> Records:
    """A cold dataset of eight extents."""
    return stored(node)


def stored(node: Node) -> Records:
    rows = np.random.default_rng(uuid.uuid4().int).integers(0, 256, (SAMPLES, RECORD), np.uint8)
    uri = node.put({"0.bin": rows.tobytes()})
    node.proxy.reset()
    return Records(uri, rows)


def opened(node: Node, records: Records) -> DatasetId:
    with Control(node.daemon.socket_dir) as control:
        return control.open_dataset([records.uri], OPTIONS).id


def read(grants: DaemonGrants, rows: np.ndarray[Any, Any], *extents: int) -> set[str]:
    """Lease, check every byte; answers where it came from."""
    answers = grants.acquire(extents or range(EXTENTS), WAIT_S)
    for answer in answers:
        assert isinstance(answer, Granted)
        found = os.pread(answer.fd, answer.size_bytes, 0)
        os.close(answer.fd)
        assert found == rows.reshape(EXTENTS, -1)[answer.extent].tobytes()
    return {answer.origin for answer in answers if isinstance(answer, Granted)}


def taken_over(node: Node, *more: str) -> None:
    old = node.daemon.take_over(*more)
    assert old.wait(WAIT_S) == 0


def refused(node: Node, *more: str) -> str:
    """What a daemon that cannot take over says."""
    before = len(node.daemon.log)
    assert node.daemon.spawn("--takeover", *more).wait(WAIT_S) == 2
    return node.daemon.log[before:]


def epochs(trainer: Trainer, rows: np.ndarray[Any, Any], enough: threading.Event) -> int:
    """Take epochs until it is enough and check each; how many."""
    count = 0
    while not enough.is_set():
        exactly_once(trainer.take(STEPS), rows)
        assert trainer.said()["by_origin"]["direct"] == 0
        count += 1
    return count


def asks(directory: str, enough: threading.Event) -> int:
    """Ask for the status until it is enough; how many daemons answered."""
    seen = set()
    with Control(directory) as control:
        while not enough.is_set():
            seen.add(control.status().pid)
        seen.add(control.status().pid)
    return len(seen)


def test_jobs_notice_nothing_of_takeovers_from_the_first_cold_epoch_on(
    tmp_path: Path, node: Node, records: Records
) -> None:
    env = node.s3.env(node.proxy.endpoint) | node.daemon.env | {"CACHESVC": "require"}
    enough = threading.Event()
    with (
        Trainer(tmp_path / "workers", records.uri, LOADING | {"num_workers": 2}, env) as workers,
        Trainer(tmp_path / "alone", records.uri, LOADING | {"num_workers": 0}, env) as alone,
        ThreadPoolExecutor(3) as pool,
    ):
        exactly = [pool.submit(epochs, one, records.rows, enough) for one in (workers, alone)]
        asking = pool.submit(asks, node.daemon.socket_dir, enough)
        try:
            wait_until(lambda: node.proxy.counts.bytes > 0)
            for _ in range(TAKEOVERS):
                taken_over(node)
        finally:
            enough.set()
        assert all(one.result(WAIT_S) for one in exactly)
        assert asking.result(WAIT_S) == 1 + TAKEOVERS
        assert "daemon" not in workers.log.replace("via daemon", "") + alone.log.replace("via daemon", "")
    assert fetched(node) == records.rows.nbytes


def test_leases_connections_and_memory_are_the_new_daemons(node: Node, records: Records) -> None:
    dataset = opened(node, records)
    grants = DaemonGrants(node.daemon.socket_dir, dataset)
    read(grants, records.rows)
    token, memory, used_bytes = grants.token, memory_of(node), node.ram().used_bytes
    taken_over(node)
    assert set(memory_of(node)) == set(memory)
    wait_until(lambda: len(memory_of(node)) == len(set(memory)))  # each once, but for grants on their way
    assert (node.ram().used_bytes, node.ram().held_bytes) == (used_bytes, 0)
    with Control(node.daemon.socket_dir) as control:
        assert control.evict(dataset).evicted_bytes == 0  # all of it is leased
        grants.release([0, 1, 2])
        wait_until(lambda: control.evict(dataset).busy_bytes == (EXTENTS - 3) * EXTENT)
    assert not grants.connect()
    assert grants.token == token
    grants.close()
    wait_until(lambda: node.readers() == 0)


def test_ranks_of_one_job_have_one_epoch_across_a_takeover(node: Node, records: Records) -> None:
    dataset, steps = opened(node, records), np.arange(EXTENTS)

    def touched() -> list[int]:
        with Control(node.daemon.socket_dir) as control:
            (found,) = [each for each in control.list() if each.dataset.id == dataset]
        return [epoch.touched for epoch in found.epochs]

    ranks = [DaemonGrants(node.daemon.socket_dir, dataset, job) for job in (7, 7, 8)]
    ranks[0].submit(Plan(steps, steps, steps))
    read(ranks[0], records.rows, 0)
    ranks[0].passed(2)
    wait_until(lambda: touched() == [2])
    taken_over(node)
    for rank in ranks[1:]:  # one of the same job, and one of another
        rank.submit(Plan(steps, steps, steps))
        rank.passed(EXTENTS)
    ranks[0].passed(EXTENTS)
    wait_until(lambda: touched() == [2 * EXTENTS - 2, EXTENTS])  # what came before is not this daemon's
    for rank in ranks:
        rank.close()
    wait_until(lambda: node.readers() == 0)


def memory_of(node: Node) -> list[str]:
    assert node.daemon.process is not None
    return sorted(held_memory(node.daemon.process.pid))


def test_a_fill_under_way_ends_first_and_its_reader_has_it(node: Node, records: Records) -> None:
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    node.proxy.reset()
    node.proxy.faults.append(Fault("slow", 1, ".bin", after_s=1.0))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read, grants, records.rows)
        wait_until(lambda: node.proxy.counts.requests > 0)
        taken_over(node)
        assert reading.result(WAIT_S) == {"ram"}
    assert fetched(node) == records.rows.nbytes
    grants.close()


@pytest.mark.slow
def test_a_prefetch_goes_on_in_the_new_daemon(own: Node) -> None:
    node, records = own, stored(own)
    dataset = opened(node, records)
    node.proxy.faults.append(Fault("slow", EXTENTS, ".bin", after_s=0.5))
    with Control(node.daemon.socket_dir) as control, ThreadPoolExecutor(1) as pool:
        replies = control.prefetch(dataset)
        next(replies)
        filling = pool.submit(list, replies)
        taken_over(node)
        last = filling.result(WAIT_S)[-1]
    assert (last.done, last.resident_extents) == (True, EXTENTS)
    assert fetched(node) == records.rows.nbytes


@pytest.mark.slow
def test_pins_and_readers_that_only_identify_themselves_go_on(own: Node) -> None:
    node, records = own, stored(own)
    dataset = opened(node, records)
    grants = DaemonGrants(node.daemon.socket_dir, dataset)
    read(grants, records.rows)
    grants.close()
    with Control(node.daemon.socket_dir) as control:
        control.pin(dataset, True)
        taken_over(node)
        (known,) = control.list()
        assert (known.pinned, known.resident_bytes) == (True, EXTENTS * EXTENT)
        assert control.evict(dataset).evicted_bytes == 0


@pytest.mark.slow
def test_a_smaller_budget_gives_up_what_it_cannot_hold(own: Node) -> None:
    node, records = own, stored(own)
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    grants.release(range(2, EXTENTS))
    os.close(grants.catalog())  # its answer: what was released has been heard
    taken_over(node, "--ram", "4MiB")
    ram = node.ram()
    assert ram.used_bytes == 4 * EXTENT == ram.budget_bytes
    assert len(memory_of(node)) == 4
    node.proxy.reset()
    assert read(grants, records.rows, 0, 1) == {"ram"}
    assert fetched(node) == 0
    grants.close()


@pytest.mark.parametrize("known", [False, True])
def test_below_a_disk_that_was_unmounted_no_new_daemon_keeps_anything(
    tmp_path: Path, s3_server: SeaweedFS, proxy: Proxy, known: bool
) -> None:
    """It does not start; but where the old one has found the tier lost, that is handed over as lost."""

    def lost() -> bool:
        with Control(node.daemon.socket_dir) as control:
            return any(tier.lost for tier in control.status().tiers)

    with mounted(tmp_path / "nvme", "size=16m") as path:
        node = serving(tmp_path, s3_server, proxy, "--ram", "8MiB", "--nvme", f"{path}=8MiB")
        with node.daemon:
            subprocess.run(["umount", "-l", str(path)], check=True)
            try:
                if known:
                    wait_until(lost)
                old, new = node.daemon.process, node.daemon.spawn("--takeover")
                assert old is not None
                wait_until(lambda: old.poll() is not None or new.poll() is not None)
                if old.poll() is None:
                    assert not known
                    assert "no disk is mounted there any more" in node.daemon.log
                else:
                    node.daemon.process = new
                    time.sleep(PROBED_S)
                    assert lost()
                assert list(path.iterdir()) == []
            finally:
                subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(path)], check=True)
            taken_over(node)


@pytest.mark.slow
def test_files_stay_locked_and_warm(tmp_path: Path, s3_server: SeaweedFS, proxy: Proxy) -> None:
    (tmp_path / "nvme").mkdir()
    node = serving(tmp_path, s3_server, proxy, "--ram", "0", "--nvme", f"{tmp_path / 'nvme'}=64MiB")
    with node.daemon:
        records = stored(node)
        grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
        assert read(grants, records.rows) == {"nvme"}
        for _ in range(2):
            taken_over(node)
            assert read(grants, records.rows) == {"nvme"}
        assert fetched(node) == records.rows.nbytes
        grants.close()


@pytest.mark.slow
def test_the_new_daemon_has_the_ports_of_the_old_one(own: Node) -> None:
    ports = dict(zip(("--metrics", "--listen", "--share"), free_ports(3)))
    more = [word for option, port in ports.items() for word in (option, f"127.0.0.1:{port}")]
    taken_over(own, *more)
    taken_over(own, *more)
    wait_until(lambda: all(listens(port) for port in ports.values()))


def listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def test_both_sockets_have_the_mode_of_the_new_daemon(own: Node) -> None:
    def modes() -> set[int]:
        here = Path(own.daemon.socket_dir)
        return {(here / name).stat().st_mode & 0o777 for name in (CONTROL_SOCKET, GRANTS_SOCKET)}

    taken_over(own, "--socket-mode", "666")
    assert modes() == {0o666}
    taken_over(own)
    assert modes() == {0o600}


def test_without_a_daemon_it_starts_as_always(own: Node) -> None:
    node, records = own, stored(own)
    node.daemon.stop()
    node.daemon.process = node.daemon.spawn("--takeover")
    wait_until(lambda: "there is no daemon to take over from" in node.daemon.log)
    wait_until(lambda: os.path.exists(f"{node.daemon.socket_dir}/cachesvc.sock"))
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    grants.close()


def test_a_daemon_that_is_ending_is_waited_for(own: Node) -> None:
    """It has no sockets any more, and ends its fills and commits: here, a lock that somebody holds."""
    own.daemon.stop()
    with open(f"{own.daemon.socket_dir}/lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own.daemon.process = own.daemon.spawn("--takeover")
        wait_until(lambda: "a daemon that is ending is waited for" in own.daemon.log)
    wait_until(own.daemon.ready)


@pytest.mark.slow
def test_a_new_daemon_that_cannot_start_leaves_the_old_one_as_it_was(tmp_path: Path, own: Node) -> None:
    node, records = own, stored(own)
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    assert "give --state-dir" in refused(node, "--state-dir", str(tmp_path / "other"))
    assert "is no directory" in refused(
        node, "--nvme", f"{tmp_path / 'none'}=50%"
    )  # found out after the standstill
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for option in ("--metrics", "--listen", "--share"):
            assert f"{option} {address} cannot be bound" in refused(node, option, address)
    read(grants, records.rows)
    assert not grants.connect()
    assert fetched(node) == records.rows.nbytes
    taken_over(node)
    read(grants, records.rows)
    assert fetched(node) == records.rows.nbytes
    grants.close()


def test_a_new_daemon_that_cannot_read_what_jobs_read_leaves_the_old_one_as_it_was(own: Node) -> None:
    node, records = own, stored(own)
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
    assert opened(node, records) == dataset  # from what the daemon held in RAM
    assert fetched(node) == records.rows.nbytes


def readers(node: Node) -> int:
    with Control(node.daemon.socket_dir) as control:
        return control.status().readers


def greeting(node: Node, protocol: int = PROTOCOL) -> tuple[socket.socket, Any]:
    """A new daemon of our own, as far as the old one's offer."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(WAIT_S)
    channel.connect(f"{node.daemon.socket_dir}/{SOCKET}")
    send(channel, Word.HELLO, pb.TakeoverHello(protocol=protocol, version="a later one"))
    offer = pb.TakeoverOffer()
    for fd in receive(channel, Word.OFFER, offer):
        os.close(fd)
    return channel, offer


def leave_at_once(channel: socket.socket) -> None:
    """Give up before the standstill."""


def leave_in_the_middle(channel: socket.socket) -> None:
    send(channel, Word.READY)
    (body,) = receive(channel, Word.STATE)
    os.close(body)
    send(channel, Word.GOT)
    for fd in receive(channel, Word.MORE):
        os.close(fd)


def leave_with_everything(channel: socket.socket) -> None:
    send(channel, Word.READY)
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
    read(grants, records.rows)  # what was there, and what must be filled
    assert not grants.connect()
    assert fetched(node) == records.rows.nbytes
    grants.close()


def test_another_protocol_is_refused_in_words(node: Node, records: Records) -> None:
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
                send(channel, Word.HELLO, pb.TakeoverHello(protocol=PROTOCOL))
            with contextlib.suppress(ConnectionResetError):  # its end, with our greeting unread
                return channel.recv(1) == b""
            return True

    os.chmod(here, 0o711)
    os.chmod(path, 0o666)
    try:
        assert as_user(NOBODY, knock)
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
    own: Node, told: signal.Signals, moment: str
) -> None:
    node, records = own, stored(own)
    grants = DaemonGrants(node.daemon.socket_dir, opened(node, records))
    read(grants, records.rows)
    old = node.daemon.process
    assert old is not None
    old.send_signal(signal.SIGSTOP)
    new = node.daemon.spawn("--takeover")
    try:
        wait_until(lambda: "asked the daemon that serves here to hand over" in node.daemon.log)
        if moment == "prepares":
            new.send_signal(signal.SIGSTOP)  # or it would have taken over before the old one is stopped again
            old.send_signal(signal.SIGCONT)
            wait_until(lambda: "prepares to take over" in node.daemon.log)
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


def test_nobody_says_that_what_a_dead_daemon_held_is_here(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with subprocess.Popen(["sleep", "60"]) as old:
        before = Predecessor(ours, Process(old.pid), pb.TakeoverOffer(), lock=-1)
        theirs.close()
        old.kill()
        assert before.hand_over().listener is None
        before.adopted()
    (said,) = caplog.messages
    assert said == "the old daemon died before it handed over; starting without what it held"


def waits_for_an_answer(node: Node) -> bool:
    """A connection stands in the old daemon's takeover socket."""
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
    """Whoever is left serves, or is started again."""
    old = node.daemon.process
    new = node.daemon.spawn("--takeover")
    assert old is not None
    hit, other = (old, new) if victim == "old" else (new, old)
    try:
        hit.wait(after_s)  # a moment chosen by chance, not a wait for something
    except subprocess.TimeoutExpired:
        hit.kill()
    hit.wait()
    node.daemon.process = other
    if victim == "new" and not_serving(other):
        node.daemon.start()
    wait_until(lambda: serves(node))


def not_serving(process: subprocess.Popen[bytes]) -> bool:
    """It had told everything, and ended."""
    try:
        return process.wait(2.0) == 0
    except subprocess.TimeoutExpired:
        return False
