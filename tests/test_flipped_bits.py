"""Single bits flip in cached files and on the way, under a real daemon: no wrong byte is handed out, and every copy
that was hit and read is found, counted and filled again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from bench.node import Daemon
from cachesvc.client import Control
from cachesvc.core.errors import CorruptData
from cachesvc.grants import Granted, Refused
from cachesvc.tiers import footer
from cachesvc.tiers.checksum import DIGEST_BYTES, block_count, block_digest
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES, Checksums
from loader import DataLoader, open_dataset
from loader.reader import VERIFY_TRIES, Reader
from tests.datasets import image_folder
from tests.loader_fakes import MemoryGrants, compiled, extent_bytes
from tests.proxy import Fault
from tests.servers import Proxy, SeaweedFS, free_ports
from tests.test_daemon import wait_until

RECORD_BYTES = 512
OBJECT_BYTES = 10 * CHECKSUM_BLOCK_BYTES
RECORDS = OBJECT_BYTES // RECORD_BYTES


class Flipper:
    """Flips single bits in the files of cache directories. `hit` are the copies: a file stays open, so that its inode
    is not another's later."""

    def __init__(self, seed: int, *directories: Path) -> None:
        self._draw = random.Random(seed)
        self._directories = directories
        self.hit: dict[int, int] = {}

    def files(self) -> list[Path]:
        found = [path for each in self._directories for path in each.rglob("?" * 32 + ".*")]
        return sorted(path for path in found if path.parent.parent.name == "extents")

    def flip(self, count: int) -> None:
        """In so many blocks, of copies that are right until now; every other one forced out of the page cache."""
        fresh = [path for path in self.files() if path.stat().st_ino not in self.hit]
        for number, path in enumerate(self._draw.choices(fresh, k=count)):
            size_bytes = int(path.suffix[1:])
            self.flip_bit(path, self._draw.randrange(size_bytes * 8), to_disk=bool(number % 2))

    def flip_bit(self, path: Path, bit: int, to_disk: bool) -> None:
        path.chmod(0o600)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self.hit.setdefault(os.fstat(fd).st_ino, fd)
        byte = os.pread(fd, 1, bit // 8)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
        if to_disk:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in self.hit.values():
            with contextlib.suppress(OSError):
                os.close(fd)


class Node:
    """A daemon with NVMe directories alone, where this process finds it."""

    def __init__(self, daemon: Daemon, metrics: int, nvme: tuple[Path, ...]) -> None:
        self.daemon, self._metrics, self.nvme = daemon, metrics, nvme

    def corrupt(self) -> int:
        """Copies that failed their checksums, as `status` says; the metrics agree."""
        with Control(self.daemon.socket_dir) as control:
            found = sum(tier.corrupt_extents for tier in control.status().tiers)
        with urllib.request.urlopen(f"http://127.0.0.1:{self._metrics}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        told = [line.split()[-1] for line in lines if line.startswith("cachesvc_corrupt_extents_total{")]
        assert sum(map(float, told)) == found
        return found

    def all_right(self, version: str) -> int:
        """Read every resident extent against its checksums; how many there are."""
        with Control(self.daemon.socket_dir) as control:
            *_, last = control.verify(version)
        assert last.corrupt_extents == 0
        return last.extents


@contextlib.contextmanager
def node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allow: str,
    directories: int = 1,
    env: Mapping[str, str] | None = None,
) -> Iterator[Node]:
    (port,) = free_ports(1)
    nvme = tuple(tmp_path / f"nvme{number}" for number in range(directories))
    options = ["--ram", "0", "--allow", allow, "--extent-bytes", str(1 << 20), "--metrics", f"127.0.0.1:{port}"]
    for path in nvme:
        path.mkdir()
        options += ["--nvme", f"{path}={96 // directories}MiB"]
    with Daemon(tmp_path / "node", options, env) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        monkeypatch.setenv("CACHESVC", "require")
        yield Node(daemon, port, nvme)
        assert daemon.stop() == 0
        assert "Traceback" not in daemon.log


@contextlib.contextmanager
def flipper(seed: int, *directories: Path) -> Iterator[Flipper]:
    found = Flipper(seed, *directories)
    yield found
    found.close()


@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_records_are_right_while_bits_flip_under_their_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_type: str
) -> None:
    count = 8
    body = np.random.default_rng(5).bytes(count * OBJECT_BYTES)
    (tmp_path / "data").mkdir()
    for at in range(count):
        (tmp_path / f"data/{at}.bin").write_bytes(body[at * OBJECT_BYTES : (at + 1) * OBJECT_BYTES])
    with node(tmp_path, monkeypatch, f"{tmp_path}/data/") as found, flipper(1, *found.nvme) as flips:
        records = open_dataset(
            tmp_path / "data", format="records", record_bytes=RECORD_BYTES, verify=True
        )
        batches = DataLoader(
            records, batch_size=64, shuffle=True, num_workers=2, worker_type=worker_type, epochs=None
        )
        read = iter(batches)
        for turn in range(3 * count * RECORDS // 64):
            if turn in (160, 200, 240):  # of 160 batches an epoch: in the second, while leases are out
                flips.flip(1)
            batch = next(read)
            for index, record in zip(batches.indices, batch):
                assert record.numpy().tobytes() == body[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
        assert len(flips.hit) == 3
        wait_until(lambda: found.corrupt() == 3)
        wait_until(lambda: found.all_right(records.version) == count)
        del read
        records.opened.close()
