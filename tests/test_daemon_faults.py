"""What must not end the daemon, nor be left behind when it ends: dying processes, hostile readers, full disks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.node import Daemon
from cachesvc.catalog.build import Options
from cachesvc.client import Control
from cachesvc.core import wire
from cachesvc.core.errors import CacheError, SourceUnavailable
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Message, Op
from cachesvc.grants import Granted
from cachesvc.leases import DaemonGrants

EXTENT = 1 << 20
EXTENTS = 8
RECORDS = Options(format="records", record_bytes=4096)


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    body = os.urandom(EXTENTS * EXTENT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(body)
    return body


@pytest.fixture
def daemon(tmp_path: Path, data: bytes) -> Iterator[Daemon]:
    with Daemon(tmp_path / "node", options(tmp_path)) as found:
        yield found
        assert found.process is not None
        assert found.process.poll() is None, found.log
        assert found.stop() == 0
        assert "Traceback" not in found.log


def options(tmp_path: Path, *more: str) -> list[str]:
    return ["--ram", "32MiB", "--allow", f"{tmp_path}/", "--extent-bytes", str(EXTENT), *more]


def opened(daemon: Daemon) -> DatasetId:
    with Control(daemon.socket_dir) as control:
        return control.open_dataset([f"{daemon.root.parent}/data/"], RECORDS).id


def children(daemon: Daemon) -> list[int]:
    assert daemon.process is not None
    pid = daemon.process.pid
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def greeted(daemon: Daemon, dataset: DatasetId) -> socket.socket:
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.settimeout(10)
    channel.connect(f"{daemon.socket_dir}/grants.sock")
    tell(channel, Message(Op.HELLO, wire.MAGIC, digest=bytes.fromhex(dataset)))
    assert wire.decode(channel.recv(4096)).op is Op.WELCOME
    return channel


def tell(channel: socket.socket, message: Message) -> None:
    channel.send(wire.encode(message))


def reads_right(daemon: Daemon, dataset: DatasetId, data: bytes) -> None:
    grants = DaemonGrants(daemon.socket_dir, dataset)
    for answer in grants.acquire(range(EXTENTS), 20.0):
        assert isinstance(answer, Granted)
        found = os.pread(answer.fd, answer.size_bytes, 0)
        os.close(answer.fd)
        assert found == data[answer.extent * EXTENT : (answer.extent + 1) * EXTENT]
    grants.close()


def test_killed_fillers_cost_retries_only(daemon: Daemon, data: bytes) -> None:
    dataset = opened(daemon)
    for pid in children(daemon):
        os.kill(pid, signal.SIGKILL)
    reads_right(daemon, dataset, data)
    assert opened(daemon) == dataset


def test_verify_while_fillers_die_reports_no_corruption(daemon: Daemon, data: bytes) -> None:
    dataset = opened(daemon)
    reads_right(daemon, dataset, data)
    with Control(daemon.socket_dir) as control:
        for checked in control.verify(dataset):
            for pid in children(daemon):
                os.kill(pid, signal.SIGKILL)
            last = checked
        assert (last.checked_extents, last.corrupt_extents, last.done) == (EXTENTS, 0, True)


def test_verify_beside_evict_and_refill_reports_no_corruption(daemon: Daemon, data: bytes) -> None:
    dataset = opened(daemon)
    for _ in range(5):
        reads_right(daemon, dataset, data)
        with Control(daemon.socket_dir) as control:
            checks = control.verify(dataset)
            next(checks)
            control.evict(dataset)
            *_, last = checks
            assert last.corrupt_extents == 0


def test_a_builder_killed_in_mid_build_is_a_typed_error_and_the_next_open_works(
    tmp_path: Path, daemon: Daemon
) -> None:
    os.mkfifo(tmp_path / "slow.bin")  # never delivers: open() of it is refused, so list it late
    os.unlink(tmp_path / "slow.bin")
    caught: list[CacheError] = []
    stop = threading.Event()

    def kill_builders() -> None:
        while not stop.is_set():
            for pid in children(daemon):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            stop.wait(0.005)

    killer = threading.Thread(target=kill_builders)
    killer.start()
    try:
        opened(daemon)
    except CacheError as error:
        caught.append(error)
    finally:
        stop.set()
        killer.join()
    assert [type(error) for error in caught] == [SourceUnavailable]
    assert "try again" in str(caught[0])
    opened(daemon)
