"""Single bits flip in cached files and in transit, under a real daemon: readers get no wrong byte, and every corrupt copy
that is read is found, counted and filled again."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES
from loader import DataLoader, open_dataset
from loader.workers.engines import WorkerType
from testbed import WAIT_S
from testbed.node import Daemon
from testbed.proxy import Fault
from testbed.servers import Proxy, SeaweedFS, free_ports
from tests.support.datasets import image_folder
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.waiting import wait_until

RECORD_BYTES = 512
OBJECT_BYTES = 10 * CHECKSUM_BLOCK_BYTES
RECORDS = OBJECT_BYTES // RECORD_BYTES
FSYNC_S = 3.0


class Flipper:
    """Flips single bits in the files of cache directories. The files of `hit` stay open, so their inodes are not reused."""

    def __init__(self, seed: int, *directories: Path) -> None:
        self._draw = random.Random(seed)
        self._directories = directories
        self.hit: dict[int, int] = {}

    def files(self) -> list[Path]:
        found = [path for each in self._directories for path in each.rglob("?" * 32 + ".*")]
        return sorted(path for path in found if path.parent.parent.name == "extents")

    def flip(self, count: int, footers: bool = False) -> None:
        """Flip a bit in each of so many correct copies; every other one is also dropped from the page cache.

        `footers`: flip it in the file's footer.
        """
        for number in range(count):
            hit = False
            while not hit:
                path = self._draw.choice(self.files())
                with contextlib.suppress(
                    FileNotFoundError
                ):  # the daemon has just dropped a copy that was hit
                    first, end = int(path.suffix[1:]) * 8, path.stat().st_size * 8
                    bit = self._draw.randrange(first, end) if footers else self._draw.randrange(first)
                    hit = self.flip_bit(path, bit, to_disk=bool(number % 2))

    def flip_bit(self, path: Path, bit: int, to_disk: bool) -> bool:
        """Return False where that copy was hit before."""
        path.chmod(0o600)
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if self.hit.setdefault(os.fstat(fd).st_ino, fd) != fd:
            os.close(fd)
            return False
        byte = os.pread(fd, 1, bit // 8)[0]
        os.pwrite(fd, bytes([byte ^ 1 << bit % 8]), bit // 8)
        if to_disk:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        return True

    def close(self) -> None:
        for fd in self.hit.values():
            os.close(fd)


class Node:
    """A daemon with NVMe directories and no RAM tier, which this process uses."""

    def __init__(self, daemon: Daemon, metrics: int, nvme: tuple[Path, ...]) -> None:
        self.daemon, self._metrics, self.nvme = daemon, metrics, nvme

    def corrupt(self) -> int:
        """Corrupt copies as `status` counts them; the metrics must agree."""
        found = 0

        def agree() -> bool:
            nonlocal found
            with Control(self.daemon.socket_dir) as control:
                found = sum(tier.corrupt_extents for tier in control.status().tiers)
            with urllib.request.urlopen(
                f"http://127.0.0.1:{self._metrics}/metrics", timeout=WAIT_S
            ) as answer:
                lines = answer.read().decode().splitlines()
            told = [line.split()[-1] for line in lines if line.startswith("cachesvc_corrupt_extents_total{")]
            return sum(map(float, told)) == found

        wait_until(agree)
        return found

    def retried(self) -> int:
        """The number of retried reads of the source."""
        with Control(self.daemon.socket_dir) as control:
            return int(control.status().sources.retries)

    def all_right(self, version: str) -> int:
        """Check every resident extent against its checksums; return their number."""
        with Control(self.daemon.socket_dir) as control:
            *_, last = control.verify(DatasetId(version))
        assert last.corrupt_extents == 0
        return last.extents


@contextlib.contextmanager
def node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    allow: str,
    directories: int = 1,
    env: Mapping[str, str] | None = None,
    nvme: tuple[Path, ...] = (),
) -> Iterator[Node]:
    (port,) = free_ports(1)
    nvme = nvme or tuple(tmp_path / f"nvme{number}" for number in range(directories))
    options = ["--ram", "0", "--allow", allow, "--extent-bytes", str(1 << 20), "--scrub-rate", "0"]
    options += ["--metrics", f"127.0.0.1:{port}"]
    for path in nvme:
        path.mkdir(exist_ok=True)
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


@pytest.mark.slow
@pytest.mark.parametrize("worker_type", ["process", "thread"])
def test_records_are_right_while_bits_flip_under_their_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker_type: WorkerType
) -> None:
    count = 8
    body = np.random.default_rng(5).bytes(count * OBJECT_BYTES)
    (tmp_path / "data").mkdir()
    for at in range(count):
        (tmp_path / f"data/{at}.bin").write_bytes(body[at * OBJECT_BYTES : (at + 1) * OBJECT_BYTES])
    with node(tmp_path, monkeypatch, f"{tmp_path}/data/") as found, flipper(1, *found.nvme) as flips:
        records = open_dataset(tmp_path / "data", format="records", record_bytes=RECORD_BYTES, verify=True)
        batches = DataLoader(
            records, batch_size=64, shuffle=True, num_workers=2, worker_type=worker_type, epochs=None
        )
        read = iter(batches)
        for number in range(3 * count * RECORDS // 64):
            if number in (
                160,
                200,
                240,
            ):  # an epoch has 160 batches: flip in the second one, while leases are out
                flips.flip(1)
            batch = next(read)
            for index, record in zip(batches.indices, batch):
                assert record.numpy().tobytes() == body[index * RECORD_BYTES : (index + 1) * RECORD_BYTES]
        assert len(flips.hit) == 3
        wait_until(lambda: found.corrupt() == 3)
        wait_until(lambda: found.all_right(records.version) == count)
        del read
        records.opened.close()


@pytest.mark.slow
def test_files_are_right_after_bits_flipped_between_two_daemons_and_under_the_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = image_folder(tmp_path / "data", ("cat", "dog"), 60, 70_000)
    wanted = sorted(map(digest, files.values()))
    with node(tmp_path, monkeypatch, f"{tmp_path}/data/", 2) as found, flipper(2, *found.nvme) as flips:
        images = open_dataset(tmp_path / "data", decode=None, verify=True)

        def right() -> bool:
            return sorted(digest(body) for body, _ in images.__getitems__(range(len(images)))) == wanted

        assert right()
        images.opened.close()
        assert found.daemon.stop() == 0
        flips.flip(2)
        flips.flip(1, footers=True)
        found.daemon.start()
        assert right()
        assert found.corrupt() == 3
        flips.flip(2)
        assert right()
        assert found.corrupt() == 5
        wait_until(lambda: found.all_right(images.version) == len(flips.files()))  # all commits are done
        images.opened.close()


def test_a_bit_that_flips_before_its_copy_is_committed_costs_another_fill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (body,) = image_folder(tmp_path / "data", ("cat",), 1, 200_000).values()
    with (
        FaultyDisk(tmp_path) as disk,
        node(tmp_path, monkeypatch, f"{tmp_path}/data/", nvme=(disk.path,)) as found,
    ):
        images = open_dataset(tmp_path / "data", decode=None, verify=True)
        disk.behave(f"fsync {FSYNC_S}")
        assert images[0] == body, "its checksums are behind it, and an fsync is under way"
        (path,) = [
            each for each in disk.path.rglob("*") if each.is_file() and each.stat().st_size > len(body)
        ]
        with (disk.backing / path.relative_to(disk.path)).open("r+b") as file, path.open("rb") as cached:
            file.seek(100_000)
            file.write(bytes([body[100_000] ^ 1]))
            file.flush()
            # Written past the mount, where the write would wait for the fsync.
            os.posix_fadvise(cached.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        assert images[0] == body
        disk.behave("")
        wait_until(lambda: found.corrupt() == 1)
        wait_until(lambda: found.all_right(images.version) == 1)
        images.opened.close()


def test_a_bit_that_flips_before_its_copy_moves_to_memory_is_found_on_the_way(tmp_path: Path) -> None:
    extent, extents = 1 << 20, 8
    body = random.Random(5).randbytes(extents * extent)
    for folder in ("data", "nvme"):
        (tmp_path / folder).mkdir()
    (tmp_path / "data" / "0.bin").write_bytes(body)
    options = ["--ram", "4MiB", "--nvme", f"{tmp_path}/nvme=64MiB", "--extent-bytes", str(extent)]
    with (
        Daemon(tmp_path / "node", [*options, "--allow", f"{tmp_path}/data"]) as daemon,
        Control(daemon.socket_dir) as control,
        flipper(4, tmp_path / "nvme") as flips,
    ):
        data = control.open_dataset([f"{tmp_path}/data"], Options(format="records", record_bytes=4096)).id
        *_, last = control.prefetch(data)
        assert last.done
        wait_until(lambda: len(flips.files()) == 6)  # the other extents are in RAM
        flips.flip(6)
        steps = np.arange(extents)
        with contextlib.closing(DaemonGrants(daemon.socket_dir, data)) as reader:
            reader.submit(Plan(steps, steps, steps))
            for step in range(extents):
                wait_until(lambda: control.status().tiers[1].corrupt_extents >= min(step, 6))  # noqa: B023
                (answer,) = reader.acquire([step], WAIT_S)
                assert isinstance(answer, Granted)
                assert answer.origin == "ram"
                assert os.pread(answer.fd, extent, 0) == body[step * extent :][:extent]
                os.close(answer.fd)
                reader.release([step])
                reader.passed(step + 1)
        assert control.status().tiers[1].corrupt_extents == 6


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_million_samples_are_right_while_one_block_in_a_hundred_flips(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_server: SeaweedFS, bucket: str, proxy: Proxy
) -> None:
    objects, epochs, client = 100, 8, s3_server.client()
    flips_an_epoch = objects * OBJECT_BYTES // CHECKSUM_BLOCK_BYTES // 100
    draw, wanted = np.random.default_rng(11), list[bytes]()
    for at in range(objects):
        body = draw.bytes(OBJECT_BYTES)
        client.put_object(Bucket=bucket, Key=f"data/{at:03d}.bin", Body=body)
        wanted += [digest(body[i : i + RECORD_BYTES]) for i in range(0, OBJECT_BYTES, RECORD_BYTES)]
    for at in draw.choice(objects, flips_an_epoch, replace=False):
        proxy.faults.append(Fault("flip", path=f"{at:03d}.bin", after_bytes=int(draw.integers(OBJECT_BYTES))))
    allow, env = f"s3://{bucket}/data/", s3_server.env(proxy.endpoint)
    samples = 0
    with node(tmp_path, monkeypatch, allow, 2, env) as found, flipper(3, *found.nvme) as flips:
        records = open_dataset(allow, format="records", record_bytes=RECORD_BYTES, verify=True)
        batches = DataLoader(records, batch_size=512, shuffle=True, num_workers=2, persistent_workers=True)
        steps = len(records) // 512
        for epoch in range(epochs):
            due = set(draw.choice(steps, flips_an_epoch, replace=False)) if 1 < epoch < epochs - 1 else set()
            for step, batch in enumerate(batches):
                if step in due:
                    flips.flip(1)
                    proxy.faults += [Fault("flip", path=".bin", after_bytes=int(draw.integers(OBJECT_BYTES)))]
                for index, record in zip(batches.indices, batch.numpy()):
                    assert digest(record) == wanted[index], f"sample {index} in epoch {epoch}"
                samples += len(batch)
            if epoch == 0:
                assert not any(fault.times for fault in proxy.faults), "flips on the way that nobody met"
                assert found.corrupt() == 0
                wait_until(lambda: found.retried() >= flips_an_epoch)  # each flip was detected and counted
                assert found.daemon.stop() == 0
                flips.flip(flips_an_epoch)
                found.daemon.start()
        assert samples >= 1_000_000
        assert len(flips.hit) == flips_an_epoch * (epochs - 2)
        wait_until(lambda: found.corrupt() == len(flips.hit))
        wait_until(lambda: found.all_right(records.version) == objects)
        wait_until(lambda: found.retried() >= flips_an_epoch * (epochs - 3))  # also after the restart
        assert not any(fault.times for fault in proxy.faults), "flips on the way that nobody met"
        gets = sum(
            times for what, times in proxy.counts.by.items() if what.startswith("GET") and ".bin" in what
        )
        assert gets >= objects + len(flips.hit) + flips_an_epoch * (epochs - 2)
        print(f"{samples:,} samples, {len(flips.hit)} copies hit, {gets} GETs of {objects} objects")


def digest(data: bytes | np.ndarray) -> bytes:
    return hashlib.sha256(data if isinstance(data, bytes) else data.data).digest()
