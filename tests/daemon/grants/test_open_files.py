"""A daemon under a low limit of open files: extents leave room for readers, and further readers get a typed error."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted, Refused
from cachesvc.config import OPEN_FILES_LEAST, OPEN_FILES_SPARE, most_in_ram, most_readers
from cachesvc.core.errors import DaemonUnavailable, InvalidInput, OutOfSpace
from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.tiers.checksum import StreamedChecksums
from cachesvc.tiers.ram import RamTier
from testbed import WAIT_S
from testbed.node import Daemon
from tests.support.reading import contents, granted
from tests.support.waiting import wait_until

EXTENT = 68 << 10  # a smaller one takes no descriptor
EXTENTS = 300
READERS = 8


class FewFiles(Daemon):
    """A daemon under a hard limit of open files, and optionally a lower soft one."""

    def __init__(self, root: Path, limit: int, soft: int = 0) -> None:
        options = ["--ram", "64MiB", "--allow", f"{root}/", "--extent-bytes", str(EXTENT)]
        super().__init__(root / "node", options)
        self.limits = f"ulimit -Sn {soft or limit}; ulimit -Hn {limit}"

    def spawn(self, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "cachesvc", "serve", *self._options, *more]
        with open(self.root / "daemon.log", "ab") as log:
            limited = ["sh", "-c", f'{self.limits}; exec "$0" "$@"', *command]
            return subprocess.Popen(limited, stdout=log, stderr=log)

    def open_files(self) -> int:
        assert self.process is not None
        return len(os.listdir(f"/proc/{self.pid}/fd"))


def read_all(daemon: Daemon, dataset: DatasetId, data: bytes, seen: Counter[str]) -> None:
    grants = DaemonGrants(daemon.socket_dir, dataset)
    for index in range(EXTENTS):
        (answer,) = grants.acquire([index], WAIT_S)
        seen[type(answer).__name__] += 1
        if isinstance(answer, Granted):
            assert contents(answer) == data[index * EXTENT : (index + 1) * EXTENT]
            grants.release([index])
    grants.close()


@pytest.mark.slow
def test_more_extents_than_open_files_leave_room_for_readers(tmp_path: Path) -> None:
    data = random.Random(7).randbytes(EXTENTS * EXTENT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data/0.bin").write_bytes(data)
    with (
        FewFiles(tmp_path, OPEN_FILES_LEAST) as daemon,
        Control(daemon.socket_dir) as control,
        contextlib.ExitStack() as stack,
    ):
        assert "extents_in_ram=128 readers=32" in daemon.log
        dataset = control.open_dataset(
            [f"{tmp_path}/data/"], Options(format="records", record_bytes=EXTENT)
        ).id
        seen: Counter[str] = Counter()
        with ThreadPoolExecutor(READERS) as pool:
            list(pool.map(lambda _: read_all(daemon, dataset, data, seen), range(READERS)))
        assert seen["Granted"] > 0, "the rest, more on a busy machine, is read elsewhere"
        wait_until(lambda: control.status().tiers[0].used_bytes == 128 * EXTENT)
        connected = 0

        def connect() -> None:
            nonlocal connected
            while connected < OPEN_FILES_LEAST:
                grants = DaemonGrants(daemon.socket_dir, dataset)
                stack.callback(grants.close)
                (answer,) = grants.acquire([connected], WAIT_S)
                connected += 1
                if isinstance(answer, Granted):
                    os.close(answer.fd)

        with pytest.raises(DaemonUnavailable, match="32 readers, as many as its limit of open files allows"):
            connect()
        assert connected >= 3 * READERS
        assert daemon.open_files() <= OPEN_FILES_LEAST - READERS, "other callers still find a descriptor"
        assert "Too many open files" not in daemon.log


def test_extents_that_cannot_be_verified_for_lack_of_open_files_are_read_elsewhere(tmp_path: Path) -> None:
    for name in ("data", "nvme"):
        (tmp_path / name).mkdir()
    (tmp_path / "data/0.bin").write_bytes(bytes(2 * EXTENT))
    options = ["--ram", "0", "--nvme", f"{tmp_path}/nvme=1MiB", "--allow", f"{tmp_path}/"]
    options += ["--extent-bytes", str(EXTENT), "--scrub-rate", "0"]
    with Daemon(tmp_path / "node", options) as daemon, contextlib.ExitStack() as stack:
        with Control(daemon.socket_dir) as control:
            records = Options(format="records", record_bytes=512)
            dataset = control.open_dataset([f"{tmp_path}/data/"], records).id
            list(control.prefetch(dataset))
        daemon.kill()
        daemon.start()
        grants = DaemonGrants(daemon.socket_dir, dataset)
        stack.callback(grants.close)
        contents(granted(grants, 0))
        assert daemon.process is not None
        _, hard = limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        stack.callback(resource.prlimit, daemon.pid, resource.RLIMIT_NOFILE, limits)
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (1, hard))
        assert grants.acquire([1], WAIT_S) == [Refused(1)]
        resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, limits)
        contents(granted(grants, 1))


def test_below_the_least_limit_a_daemon_does_not_start(tmp_path: Path) -> None:
    daemon = FewFiles(tmp_path, OPEN_FILES_LEAST - 1)
    daemon.root.mkdir()
    daemon.launch()
    assert daemon.process is not None
    assert daemon.process.wait(WAIT_S) == InvalidInput.code
    assert "ulimit -Hn), 256 at least" in daemon.log
    assert daemon.log.count("\n") == 1
    daemon.stop()


def test_the_limit_is_divided_between_extents_and_readers() -> None:
    assert (most_in_ram(256), most_readers(256)) == (128, 32)
    assert (most_in_ram(65_536), most_readers(65_536)) == (65_536 - OPEN_FILES_SPARE, 8192)
    assert most_in_ram(10**6 + OPEN_FILES_SPARE) == 10**6, "what is advised for so many extents"


def test_the_ram_tier_is_full_where_open_files_are_short() -> None:
    tier = RamTier(most=2)
    first, second, third = (ExtentId(bytes([number]) * 16) for number in range(3))
    filled(tier, first, EXTENT)
    os.close(tier.reserve(second, EXTENT))
    with pytest.raises(OutOfSpace, match="as many as the limit of open files allows"):
        tier.reserve(third, EXTENT)
    tier.evict(first)
    os.close(tier.reserve(third, EXTENT))
    tier.close()


def filled(tier: RamTier, extent: ExtentId, size: int) -> None:
    fd = tier.reserve(extent, size)
    os.pwrite(fd, bytes(extent)[:1] * size, 0)
    tier.commit(extent, StreamedChecksums(size).checksums(fd))
    os.close(fd)


def test_small_extents_take_no_descriptor_and_are_sealed_for_each_reader() -> None:
    tier, before = RamTier(most=1), len(os.listdir("/proc/self/fd"))
    extents = [ExtentId(bytes([number]) * 16) for number in range(50)]
    for extent in extents:
        filled(tier, extent, 5)
    assert len(os.listdir("/proc/self/fd")) == before
    (one, checksums), (other, _) = tier.open(extents[7]), tier.open(extents[7])
    assert os.pread(one, 10, 0) == os.pread(other, 10, 0) == bytes([7]) * 5
    assert checksums is not None
    reopened = os.open(f"/proc/self/fd/{one}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(reopened, b"x", 0)
    os.close(reopened)
    tier.evict(extents[7])
    again = RamTier(most=1)
    again.adopt(extents[7], one, checksums)
    assert os.pread(other, 10, 0) == bytes([7]) * 5, "a reader keeps what it has"
    found, _ = again.open(extents[7])
    assert os.pread(found, 10, 0) == bytes([7]) * 5
    for fd in (other, found):
        os.close(fd)
    tier.close()
    again.close()


@pytest.mark.slow
def test_a_daemon_raises_its_own_limit_as_far_as_it_may(tmp_path: Path) -> None:
    daemon = FewFiles(tmp_path, 3 * OPEN_FILES_LEAST, soft=OPEN_FILES_LEAST)
    with daemon:
        assert daemon.process is not None
        limits = resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE)
        assert limits == (3 * OPEN_FILES_LEAST, 3 * OPEN_FILES_LEAST)
        assert f"readers={most_readers(3 * OPEN_FILES_LEAST)}" in daemon.log
