"""Faults that the daemon survives, or cleans up after: dying processes, hostile readers, full disks."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest

from cachesvc.client import caller_token as identity
from cachesvc.client.control import Control
from cachesvc.client.failover import FailoverGrants
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Refused
from cachesvc.core import wire
from cachesvc.core.errors import (
    CacheError,
    DaemonUnavailable,
    DeadlineExceeded,
    NotAllowed,
    SourceUnavailable,
)
from cachesvc.core.model import DatasetId
from cachesvc.core.wire import Message, Op
from cachesvc.daemon.control.callers import MAX_URIS
from cachesvc.system import datagrams
from loader.reading.connect import DatasetLink
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.servers import Proxy, SeaweedFS
from tests.support.greetings import connected, tell
from tests.support.processes import children, slow_fillers, stopped_fills
from tests.support.reading import contents, read_extent
from tests.support.records import EXTENT, EXTENTS, RECORDS, opened, options, written
from tests.support.shared_daemon import for_one_test
from tests.support.waiting import wait_until


@pytest.fixture
def data(tmp_path: Path) -> bytes:
    return written(tmp_path)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    root = tmp_path_factory.getbasetemp()
    with Daemon(tmp_path_factory.mktemp("node"), options(root)) as found:
        yield found
        assert found.stop() == 0


@pytest.fixture
def daemon(shared: Daemon) -> Iterator[Daemon]:
    """The daemon of this module, which survives each test."""
    assert shared.process is not None
    pid, before = shared.pid, len(shared.log)
    for found in for_one_test(shared):
        yield found
        assert (shared.process.poll(), shared.pid) == (None, pid), shared.log
        assert "Traceback" not in shared.log[before:]


def reads_right(daemon: Daemon, dataset: DatasetId, data: bytes) -> None:
    grants = DaemonGrants(daemon.socket_dir, dataset)
    assert b"".join(map(contents, grants.acquire(range(EXTENTS), WAIT_S))) == data
    grants.close()


@pytest.mark.slow
def test_killed_fillers_cost_retries_only(tmp_path: Path, daemon: Daemon, data: bytes) -> None:
    dataset = opened(daemon, tmp_path)
    for pid in children(daemon.pid):
        os.kill(pid, signal.SIGKILL)
    reads_right(daemon, dataset, data)
    assert opened(daemon, tmp_path) == dataset


@pytest.mark.slow
def test_verify_while_fillers_die_reports_no_corruption(tmp_path: Path, daemon: Daemon, data: bytes) -> None:
    dataset = opened(daemon, tmp_path)
    reads_right(daemon, dataset, data)
    with Control(daemon.socket_dir) as control:
        checks = control.verify(dataset)
        next(checks)
        for pid in children(daemon.pid):
            os.kill(pid, signal.SIGKILL)
        *_, last = checks
        assert (last.checked_extents, last.corrupt_extents, last.done) == (EXTENTS, 0, True)


@pytest.mark.slow
def test_verify_beside_evict_and_refill_reports_no_corruption(
    tmp_path: Path, daemon: Daemon, data: bytes
) -> None:
    dataset = opened(daemon, tmp_path)
    for _ in range(5):
        reads_right(daemon, dataset, data)
        with Control(daemon.socket_dir) as control:
            checks = control.verify(dataset)
            next(checks)
            control.evict(dataset)
            *_, last = checks
            assert last.corrupt_extents == 0


def test_a_builder_killed_during_a_build_is_a_typed_error_and_the_next_open_works(
    tmp_path: Path, data: bytes
) -> None:
    held, path = slow_fillers(tmp_path)
    caught: list[CacheError] = []
    stop = threading.Event()
    with Daemon(tmp_path / "node", options(tmp_path), {"PYTHONPATH": path}) as daemon:

        def kill_builders() -> None:
            for pid in children(daemon.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        def keep_killing() -> None:
            while not stop.wait(0.005):
                kill_builders()

        held.touch()  # builders that start from now on wait while this file exists
        kill_builders()
        killer = threading.Thread(target=keep_killing)
        killer.start()
        try:
            opened(daemon, tmp_path)
        except CacheError as error:
            caught.append(error)
        finally:
            stop.set()
            killer.join()
            held.unlink()
        assert [type(error) for error in caught] == [SourceUnavailable]
        assert "try again" in str(caught[0])
        opened(daemon, tmp_path)
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


def test_unexpected_errors_in_a_job_are_answered(tmp_path: Path, daemon: Daemon, data: bytes) -> None:
    dataset = opened(daemon, tmp_path)
    catalog = daemon.root / f"state/catalogs/{dataset}.lmdb"
    catalog.unlink()
    (daemon.root / "state/catalogs").rename(daemon.root / "state/gone")
    (daemon.root / "state/catalogs").touch()  # the builder cannot write
    with pytest.raises(CacheError):
        opened(daemon, tmp_path)
    (daemon.root / "state/catalogs").unlink()
    (daemon.root / "state/gone").rename(daemon.root / "state/catalogs")
    assert opened(daemon, tmp_path) == dataset


@pytest.mark.slow
def test_openings_of_more_uris_than_a_datagram_holds(tmp_path: Path, daemon: Daemon) -> None:
    folder = tmp_path / ("many" + "y" * 200)
    folder.mkdir()
    names = [f"{folder}/{number:05d}.bin" for number in range(1500)]
    for name in names:
        Path(name).write_bytes(b"x" * 4096)
    with Control(daemon.socket_dir) as control:
        assert control.open_dataset(names, RECORDS).dataset.samples == len(names)
    assert len(children(daemon.pid)) >= 2


def test_a_reader_that_leaves_before_its_welcome_leaves_no_claim(
    tmp_path: Path, daemon: Daemon, data: bytes
) -> None:
    dataset = opened(daemon, tmp_path)
    for _ in range(20):
        channel = connected(daemon)
        tell(channel, Message(Op.HELLO, wire.MAGIC, digest=bytes.fromhex(dataset)))
        channel.close()
    reads_right(daemon, dataset, data)
    with Control(daemon.socket_dir) as control:
        wait_until(lambda: control.status().readers == 0)
        (listed,) = [each for each in control.list() if each.dataset.id == dataset]
        assert listed.readers == 0
        assert listed.bound == 0


def test_a_program_of_another_release_is_told_so_at_once(
    tmp_path: Path,
    daemon: Daemon,
    data: bytes,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    dataset = opened(daemon, tmp_path)
    with monkeypatch.context() as later:
        later.setattr(wire, "MAGIC", wire.MAGIC + 1)
        later.setenv("CACHESVC_TIMEOUT_S", "0.5")
        with pytest.raises(DaemonUnavailable, match=r"release .* install one release of cachesvc for both"):
            DaemonGrants(daemon.socket_dir, dataset).catalog()
        with pytest.raises(DaemonUnavailable, match="install one release"):
            DatasetLink(dataset, daemon.socket_dir).catalog()
        assert "install one release of cachesvc for both): waiting up to" in caplog.text
        failing = FailoverGrants(DaemonGrants(daemon.socket_dir, dataset), None)
        with pytest.raises(DaemonUnavailable, match=r"no direct reads: .*install one release"):
            failing.acquire([0], 0.3)
        caller = identity.CallerIdentity(daemon.socket_dir)
        assert caller.metadata() == ()  # its calls carry no identity
    reads_right(daemon, dataset, data)


@pytest.mark.slow
def test_without_descriptors_readers_are_turned_away_and_nothing_is_dropped(
    tmp_path: Path, data: bytes
) -> None:
    with Daemon(tmp_path / "node", options(tmp_path)) as daemon:
        dataset = opened(daemon, tmp_path)
        reads_right(daemon, dataset, data)
        assert daemon.process is not None
        pid = daemon.pid
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")) + 3, 4096))
        channels = []
        for _ in range(40):
            channels.append(connected(daemon))
        said = wire.decode(datagrams.receive(channels[-1], wire.MAX_MESSAGE_BYTES)[0])
        assert "as many files open as its limit allows" in said.text
        assert channels[-1].recv(10) == b""
        for channel in channels:
            channel.close()
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (4096, 4096))
        reads_right(daemon, dataset, data)
        assert "a request is refused" in daemon.log
        assert "corrupt" not in daemon.log


def test_fills_that_a_filler_at_its_limit_refuses_are_read_elsewhere(tmp_path: Path, data: bytes) -> None:
    with Daemon(tmp_path / "node", options(tmp_path, "--fillers", "1")) as daemon:
        dataset = opened(daemon, tmp_path)
        grants = DaemonGrants(daemon.socket_dir, dataset)
        read_extent(grants, 1)  # the filler has opened the files that it needs
        for pid in children(daemon.pid):
            resource.prlimit(pid, resource.RLIMIT_NOFILE, (0, 4096))
        assert grants.acquire([0], WAIT_S) == [Refused(0)]
        grants.close()
        assert "a filler process is at its limit (Too many open files)" in daemon.log
        assert "Traceback" not in daemon.log


def test_the_most_uris_of_an_opening_fit_into_a_message(daemon: Daemon) -> None:
    elsewhere = [f"file:///elsewhere/{number:0100}" for number in range(MAX_URIS)]
    with Control(daemon.socket_dir) as control, pytest.raises(NotAllowed):
        control.open_dataset(elsewhere, RECORDS)


@pytest.fixture
def filled(s3_server: SeaweedFS, bucket: str) -> str:
    """A prefix with an object of eight extents."""
    s3_server.client().put_object(Bucket=bucket, Key="data/0.bin", Body=os.urandom(EXTENTS * EXTENT))
    return f"s3://{bucket}/data/"


def of_bucket(prefix: str) -> list[str]:
    return ["--ram", "32MiB", "--allow", prefix, "--extent-bytes", str(EXTENT)]


STREAMS = """
import sys, threading
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError, DeadlineExceeded, InvalidInput, SourceUnavailable
control = Control(sys.argv[1])
print("ready", flush=True)
try:
    for reply in control.prefetch(sys.argv[2]):
        print("going", flush=True)
except CacheError as error:
    print(type(error).__name__, flush=True)
"""


def test_sigterm_while_a_prefetch_streams_ends_in_time(
    tmp_path: Path, s3_server: SeaweedFS, filled: str
) -> None:
    proxy = Proxy(s3_server.endpoint.removeprefix("http://"), 0.5, 100_000)
    with proxy, Daemon(tmp_path / "node", of_bucket(filled), s3_server.env(proxy.endpoint)) as daemon:
        with Control(daemon.socket_dir) as control:
            dataset = control.open_dataset([filled], RECORDS).id
        command = [sys.executable, "-c", STREAMS, daemon.socket_dir, dataset]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as client:
            assert client.stdout is not None
            assert client.stdout.readline() == "ready\n"
            assert client.stdout.readline() == "going\n"
            assert daemon.stop() == 0
            assert client.stdout.read().split()[-1] == "DaemonUnavailable"
        assert "Traceback" not in daemon.log


@pytest.mark.slow
def test_an_eviction_ends_a_prefetch_that_streams(tmp_path: Path, s3_server: SeaweedFS, filled: str) -> None:
    proxy = Proxy(s3_server.endpoint.removeprefix("http://"), 0.5, 100_000)
    daemon = Daemon(tmp_path / "node", of_bucket(filled), s3_server.env(proxy.endpoint))
    with proxy, daemon, Control(daemon.socket_dir) as control, Control(daemon.socket_dir) as other:
        dataset = control.open_dataset([filled], RECORDS).id
        going = control.prefetch(dataset)
        assert not next(going).done
        other.evict(dataset)
        deadline = time.monotonic() + WAIT_S
        with pytest.raises(CacheError, match="evicted while it was filled; run prefetch again"):
            list(takewhile(lambda _: time.monotonic() < deadline, going))
        assert not next(other.prefetch(dataset)).done, "another goes on"


@pytest.mark.slow
def test_an_acquire_past_its_deadline_leaves_neither_descriptor_nor_lease(
    tmp_path: Path, s3_server: SeaweedFS, filled: str
) -> None:
    node = Daemon(tmp_path / "node", of_bucket(filled), s3_server.env())
    with node as daemon, Control(daemon.socket_dir) as control:
        dataset = control.open_dataset([filled], RECORDS).id
        grants = DaemonGrants(daemon.socket_dir, dataset)
        read_extent(grants, 0)
        before = len(os.listdir("/proc/self/fd"))
        with stopped_fills(daemon):
            with pytest.raises(DeadlineExceeded):
                grants.acquire([0, 1], 0.5)
            assert len(os.listdir("/proc/self/fd")) <= before
        read_extent(grants, 1)
        os.close(grants.catalog())
        wait_until(lambda: control.evict(dataset).busy_bytes == 0)
        grants.close()


def test_unusable_files_of_a_killed_daemon_among_its_catalogs_are_removed(
    tmp_path: Path, data: bytes
) -> None:
    with Daemon(tmp_path / "node", options(tmp_path)) as daemon:
        dataset = opened(daemon, tmp_path)
        daemon.kill()
        catalogs = tmp_path / "node/state/catalogs"
        (catalogs / f"{dataset}.lmdb.77.tmp").write_bytes(b"half")
        (catalogs / f"{'0' * 32}.lmdb").write_bytes(b"cut")
        (catalogs / f"{'1' * 32}.lmdb").symlink_to("nowhere")
        os.mkfifo(catalogs / f"{'2' * 32}.lmdb")
        daemon.start()
        assert os.listdir(catalogs) == [f"{dataset}.lmdb"]
        reads_right(daemon, dataset, data)
        daemon.kill()
        folders = {"lost+found", f"{'3' * 32}.lmdb"}
        for folder in folders:
            (catalogs / folder).mkdir()
        daemon.start()
        assert set(os.listdir(catalogs)) == {f"{dataset}.lmdb", *folders}
        reads_right(daemon, dataset, data)


def test_a_removed_catalogs_folder_is_made_again(tmp_path: Path, daemon: Daemon, data: bytes) -> None:
    shutil.rmtree(daemon.root / "state/catalogs")
    reads_right(daemon, opened(daemon, tmp_path), data)
    assert (daemon.root / "state/catalogs").stat().st_mode & 0o777 == 0o700


KNOCK = """
import os, sys
from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId
from cachesvc.client.grants import DaemonGrants

def control():
    with Control(sys.argv[1]) as found:
        found.status()

def grants():
    DaemonGrants(sys.argv[1], DatasetId("0" * 32)).acquire([0], 5.0)

os.setgid(65534)
os.setuid(65534)
for knock in (control, grants):
    try:
        knock()
    except CacheError as error:
        print(type(error).__name__, error)
"""


def test_a_socket_of_another_user_is_not_allowed_rather_than_no_daemon(daemon: Daemon) -> None:
    if os.geteuid():
        pytest.skip("becoming another user needs root")
    for mode in (0o755, 0o700):
        os.chmod(daemon.socket_dir, mode)
        command = [sys.executable, "-c", "import grpc, cachesvc.v1.services\n" + KNOCK, daemon.socket_dir]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        assert [line.split()[0] for line in said] == ["NotAllowed", "NotAllowed"]
        assert all("join the group" in line for line in said)


def no_more_threads(pid: int) -> tuple[int, int]:
    """Leave a process no address space for a new thread's stack; return the old limit."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    before = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize() + (2 << 20), before[1]))
    return before


def test_where_no_thread_can_be_started_the_existing_ones_answer_calls(
    tmp_path: Path, daemon: Daemon, data: bytes
) -> None:
    assert daemon.process is not None

    def ask() -> None:
        with contextlib.suppress(CacheError), Control(daemon.socket_dir) as control:
            control.status()

    before = no_more_threads(daemon.pid)
    crowd = [threading.Thread(target=ask, daemon=True) for _ in range(24)]
    for each in crowd:
        each.start()
    for each in crowd:
        each.join(WAIT_S)

    def crowded() -> bool:
        """Call again: one thread is enough for calls that came one after another."""
        again = [threading.Thread(target=ask, daemon=True) for _ in crowd]
        for each in again:
            each.start()
        for each in again:
            each.join(WAIT_S)
        return "no more threads can be started" in daemon.log

    wait_until(lambda: "no more threads can be started" in daemon.log or crowded())
    resource.prlimit(daemon.pid, resource.RLIMIT_AS, before)
    assert opened(daemon, tmp_path)
    assert "no more threads can be started" in daemon.log
