"""Threads of one process on one connection to a daemon: each waits for its own extents alone."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from cachesvc.client import connection
from cachesvc.client.connection import Connection
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted, Refused
from cachesvc.core import wire
from cachesvc.core.errors import CacheError, DaemonUnavailable, DeadlineExceeded
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Op
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.processes import held_memory, stopped_fills
from tests.support.reading import read_extent
from tests.support.records import EXTENT, EXTENTS, opened, options, written
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until

RESIDENT = 2
COLD = 5
THREADS = 6


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return written(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.getbasetemp()
    with Daemon(tmp_path_factory.mktemp("node"), options(root)) as found:
        yield found


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    yield from for_one_test(shared)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as found:
        yield found


def kept(daemon: Daemon) -> tuple[int, int]:
    """Extents and connections to the grants socket that this process has open; gRPC keeps its own for a while."""
    return len(held_memory(os.getpid())), connections(daemon)


def connections(daemon: Daemon) -> int:
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # not connected, or closed since it was listed
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                found = socket.socket(fileno=os.dup(int(name)))
                with found:
                    count += found.getpeername() == f"{daemon.socket_dir}/grants.sock"
    return count


def part(data: bytes, extent: int) -> bytes:
    return data[extent * EXTENT : (extent + 1) * EXTENT]


def asking(pool: ThreadPoolExecutor, grants: DaemonGrants, extents: list[int]) -> list[Future[bytes]]:
    """Threads that wait for cold extents, each for its own; returns when all have asked."""
    waits = [pool.submit(read_extent, grants, extent) for extent in extents]
    wait_until(lambda: grants.outstanding >= len(extents))
    return waits


@pytest.mark.slow
def test_a_thread_that_waits_for_a_cold_extent_delays_no_other(
    tmp_path: Path, daemon: Daemon, data: bytes, pool: ThreadPoolExecutor
) -> None:
    grants = DaemonGrants(daemon.socket_dir, opened(daemon, tmp_path))
    for extent in range(RESIDENT):
        read_extent(grants, extent)
    before = kept(daemon)
    with stopped_fills(daemon):
        waits = asking(pool, grants, [COLD, COLD + 1])
        for turn in range(50):
            assert read_extent(grants, turn % RESIDENT, 10) == part(data, turn % RESIDENT)
        others = [pool.submit(read_extent, grants, extent, 10.0) for extent in (0, 1, 0, 1)]
        assert [other.result(WAIT_S) for other in others] == [part(data, extent) for extent in (0, 1, 0, 1)]
        with pytest.raises(DeadlineExceeded):
            read_extent(grants, COLD, 0.2)
        os.close(grants.catalog())
        assert not any(wait.done() for wait in waits)
    assert [wait.result(WAIT_S) for wait in waits] == [part(data, COLD), part(data, COLD + 1)]
    assert read_extent(grants, 0) == part(data, 0)
    assert kept(daemon) == before
    grants.close()


def test_a_long_wait_for_a_stopped_daemon_is_logged_once(
    tmp_path: Path,
    daemon: Daemon,
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    grants = DaemonGrants(daemon.socket_dir, opened(daemon, tmp_path))
    assert read_extent(grants, 0) == part(data, 0)
    monkeypatch.setattr(connection, "WARN_AFTER_S", 0.1)
    assert daemon.process is not None
    os.kill(daemon.pid, signal.SIGSTOP)
    with pytest.raises(DeadlineExceeded):
        read_extent(grants, COLD, 0.5)
    (line,) = [line for line in caplog.messages if "has granted nothing for" in line]
    assert daemon.socket_dir in line
    os.kill(daemon.pid, signal.SIGCONT)
    assert read_extent(grants, COLD) == part(data, COLD)
    grants.close()


@pytest.mark.slow
def test_more_extents_than_a_sockets_buffer_holds_answers_for_are_granted_in_one_call(tmp_path: Path) -> None:
    extents = 1100
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(os.urandom(extents * 4096))
    small = ["--ram", "16MiB", "--allow", f"{tmp_path}/", "--extent-bytes", "4096"]
    with Daemon(tmp_path / "node", small) as daemon:
        grants = DaemonGrants(daemon.socket_dir, opened(daemon, tmp_path))
        for turn in ("cold", "resident", "resident"):
            answers = grants.acquire(range(extents), 60.0)
            assert [answer.extent for answer in answers] == [*range(extents)], turn
            for answer in answers:
                assert isinstance(answer, Granted), turn
                os.close(answer.fd)
            grants.release(range(extents))
        grants.close()


class _Greets(DaemonGrants):
    """Counts the connections that it makes."""

    def __init__(self, directory: str, dataset: DatasetId) -> None:
        super().__init__(directory, dataset)
        self.welcomed: list[int] = []

    def _greet(self, connection: Connection) -> None:
        super()._greet(connection)
        self.welcomed.append(self.token)


def test_waiting_threads_raise_when_the_daemon_is_killed_and_one_connection_replaces_theirs(
    tmp_path: Path, daemon: Daemon, data: bytes, pool: ThreadPoolExecutor
) -> None:
    grants = _Greets(daemon.socket_dir, opened(daemon, tmp_path))
    read_extent(grants, 0)
    before = kept(daemon)
    (held,) = grants.acquire([1], 30)
    with stopped_fills(daemon):
        waits = asking(pool, grants, [3, 4, 5, 6])
        daemon.kill()
    for wait in waits:
        with pytest.raises(DaemonUnavailable):
            wait.result(WAIT_S)
    with pytest.raises(DaemonUnavailable):
        read_extent(grants, 0)
    daemon.start()
    again = [pool.submit(read_extent, grants, extent) for extent in range(EXTENTS)]
    assert [each.result(WAIT_S) for each in again] == [part(data, extent) for extent in range(EXTENTS)]
    assert len(grants.welcomed) == 2
    assert isinstance(held, Granted)
    assert os.pread(held.fd, held.size_bytes, 0) == part(data, 1)
    os.close(held.fd)
    grants.release([1])
    assert kept(daemon) == before
    grants.close()


def test_close_ends_every_wait(tmp_path: Path, daemon: Daemon, data: bytes, pool: ThreadPoolExecutor) -> None:
    before = kept(daemon)
    grants = DaemonGrants(daemon.socket_dir, opened(daemon, tmp_path))
    read_extent(grants, 0)
    with stopped_fills(daemon):
        waits = asking(pool, grants, [3, 4, 5])
        grants.close()
        for wait in waits:
            with pytest.raises(CacheError, match="closed"):
                wait.result(WAIT_S)
        with pytest.raises(CacheError, match="closed"):
            grants.acquire([0], 10)
        assert kept(daemon) == before


def test_a_child_forked_while_threads_wait_keeps_nothing_and_disturbs_no_thread(
    tmp_path: Path, daemon: Daemon, data: bytes, pool: ThreadPoolExecutor
) -> None:
    grants = DaemonGrants(daemon.socket_dir, opened(daemon, tmp_path))
    read_extent(grants, 0)
    with stopped_fills(daemon):
        waits = asking(pool, grants, [3, 4])
        child = os.fork()
        if child == 0:
            inherited = connections(daemon)
            grants.close()
            os._exit(0 if (inherited, connections(daemon)) == (1, 0) else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert [wait.result(WAIT_S) for wait in waits] == [part(data, 3), part(data, 4)]
    grants.close()


@pytest.mark.slow
def test_threads_get_their_extents_while_deadlines_pass_and_the_daemon_dies(
    tmp_path: Path, daemon: Daemon, data: bytes, pool: ThreadPoolExecutor
) -> None:
    """A seeded stress: short deadlines, several extents at once, a kill -9 in the midst."""
    before = kept(daemon)
    dataset = opened(daemon, tmp_path)
    grants = DaemonGrants(daemon.socket_dir, dataset)
    over, right = threading.Event(), [0] * THREADS

    def reads(seed: int) -> None:
        draw = random.Random(seed)
        while not over.is_set():
            extents = draw.sample(range(EXTENTS), draw.randint(1, 4))
            try:
                answers = grants.acquire(extents, draw.choice([0.0, 0.001, 10.0]))
            except DeadlineExceeded:
                continue
            except DaemonUnavailable:
                over.wait(0.01)  # paces the knocking
                continue
            assert [answer.extent for answer in answers] == extents
            right[seed] += sum(checked(answer, data) for answer in answers)
            grants.release([answer.extent for answer in answers if isinstance(answer, Granted)])

    def checked(answer: Granted | Refused, data: bytes) -> bool:
        if isinstance(answer, Refused):
            return False
        found = os.pread(answer.fd, 64, 0)
        os.close(answer.fd)
        assert found == part(data, answer.extent)[:64]
        return True

    def all_read(count: int) -> None:
        goal = [found + count for found in right]
        wait_until(lambda: all(now >= then for now, then in zip(right, goal, strict=True)))

    threads = [pool.submit(reads, seed) for seed in range(THREADS)]
    all_read(50)
    daemon.kill()
    daemon.start()
    all_read(50)
    over.set()
    for thread in threads:
        thread.result(WAIT_S)
    assert not grants.outstanding
    grants.close()
    assert kept(daemon) == before


def test_an_invalid_message_ends_the_connection(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "grants.sock"))
        listener.listen(1)

        def answers() -> None:
            channel, _ = listener.accept()
            with channel:
                channel.recv(4096)
                channel.send(wire.encode(Op.WELCOME, 0, 8, 7))
                channel.recv(4096)
                with open("/dev/zero") as zero:
                    socket.send_fds(channel, [b"nonsense"], [zero.fileno()])

        thread = threading.Thread(target=answers)
        thread.start()
        grants = DaemonGrants(str(tmp_path), DatasetId("0" * 32))
        with pytest.raises(DaemonUnavailable):
            grants.acquire([0], 10)
        thread.join(WAIT_S)
        grants.close()
    opened_files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert "/dev/zero" not in opened_files
