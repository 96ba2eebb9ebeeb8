"""Extents that a daemon finds corrupt after it granted them: readers release them and read them anew."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import fsspec
import numpy as np
import pytest

from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Granted, Refused
from cachesvc.core.model import DatasetId
from loader import DataLoader, Dataset, open_dataset
from loader.reading.reader import ExtentReader
from loader.workers.engines import WorkerType
from testbed.node import Daemon
from tests.support.faults.disks import flip
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.reading import contents, granted
from tests.support.training.loader_fakes import MemoryGrants, compiled
from tests.support.waiting import wait_until

RECORD, EXTENT, EXTENTS = 4096, 1 << 20, 8
BODY = np.random.default_rng(1).bytes(EXTENT * EXTENTS)


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Daemon]:
    """Makes a daemon over a cache directory, which this process finds; without RAM unless that is given."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "0.bin").write_bytes(BODY)
    monkeypatch.setenv("CACHESVC", "require")

    def over(directory: Path, *more: str) -> Daemon:
        options = ["--nvme", f"{directory}=64MiB", "--extent-bytes", str(EXTENT)]
        options += ["--allow", f"{tmp_path}/data/"]
        daemon = Daemon(tmp_path / "node", [*options, *(more or ("--ram", "0"))])
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        return daemon

    return over


def opened(tmp_path: Path) -> Dataset:
    return open_dataset(tmp_path / "data", format="records", record_bytes=RECORD)


def wrong(batches: DataLoader) -> int:
    """The number of an epoch's samples that differ from the source."""
    found = (
        (index, sample) for batch in batches for index, sample in zip(batches.indices, batch, strict=True)
    )
    return sum(
        sample.numpy().tobytes() != BODY[index * RECORD : (index + 1) * RECORD] for index, sample in found
    )


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "kind"), [(0, "process"), (2, "process"), (2, "thread")])
def test_a_loader_that_has_a_rotten_file_open_reads_it_anew_once_that_is_found(
    tmp_path: Path, environment: Callable[..., Daemon], workers: int, kind: WorkerType
) -> None:
    (tmp_path / "nvme").mkdir()
    with environment(tmp_path / "nvme") as daemon, Control(daemon.socket_dir) as control:
        data = opened(tmp_path)
        batches = DataLoader(
            data, 64, shuffle=True, num_workers=workers, persistent_workers=workers > 0, worker_type=kind
        )
        assert wrong(batches) == 0
        wait_until(lambda: control.status().tiers[0].used_bytes >= EXTENT * EXTENTS)
        for path in sorted((tmp_path / "nvme").rglob("extents/*/*"))[:3]:
            flip(path, 5000)
        *_, last = control.verify(DatasetId(data.version))
        assert last.corrupt_extents == 3
        # within a second or two: a look comes once a second
        wait_until(lambda: wrong(batches) == 0)
        assert wrong(batches) == 0
        data.opened.close()


@pytest.mark.parametrize(("workers", "verify"), [(0, False), (0, True), (2, False)])
def test_a_file_that_is_cut_under_a_reader_is_replaced_and_no_read_fails(
    tmp_path: Path, environment: Callable[..., Daemon], workers: int, verify: bool
) -> None:
    (tmp_path / "nvme").mkdir()
    with environment(tmp_path / "nvme") as daemon, Control(daemon.socket_dir) as control:
        data = open_dataset(tmp_path / "data", format="records", record_bytes=RECORD, verify=verify)
        batches = DataLoader(data, 64, shuffle=True, num_workers=workers, persistent_workers=workers > 0)
        assert wrong(batches) == 0
        wait_until(lambda: control.status().tiers[0].used_bytes >= EXTENT * EXTENTS)
        for length, path in enumerate(sorted((tmp_path / "nvme").rglob("extents/*/*"))[:3]):
            path.chmod(0o600)
            os.truncate(path, length * 10_000)
        assert wrong(batches) == 0
        assert [bytes(sample) for sample in (data[0], data[-1])] == [BODY[:RECORD], BODY[-RECORD:]]
        wait_until(lambda: control.status().tiers[0].corrupt_extents == 3)
        data.opened.close()


@pytest.mark.slow
def test_a_file_that_is_cut_under_a_reader_by_name_is_replaced(
    tmp_path: Path, environment: Callable[..., Daemon], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvme").mkdir()
    monkeypatch.setenv("CACHESVC", "require")
    with environment(tmp_path / "nvme"):
        files = fsspec.filesystem("cachesvc", skip_instance_cache=True)
        (path,) = files.ls(f"file/{tmp_path}/data", detail=False)
        with files.open(path) as file:
            assert file.read(EXTENT) == BODY[:EXTENT]
            for cached in (tmp_path / "nvme").rglob("extents/*/*"):
                cached.chmod(0o600)
                os.truncate(cached, 10_000)
            file.seek(20_000)
            assert file.read() == BODY[20_000:]
        files.invalidate_cache()


def test_what_never_reached_the_disk_is_read_anew(tmp_path: Path, environment: Callable[..., Daemon]) -> None:
    """Failed write-back leaves pages that the kernel marks clean: they are read as written until it drops them."""
    with FaultyDisk(tmp_path) as disk, environment(disk.path, "--ram", "2MiB") as daemon:
        data = opened(tmp_path)
        batches = DataLoader(data, 64, shuffle=True)
        disk.behave("fsync:/tmp/ eio")  # and the disk passes for sound
        assert wrong(batches) == 0
        wait_until(lambda: daemon.log.count("a commit failed") >= 3)

        def held() -> list[int]:
            links = {int(fd): f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")}
            return [
                fd
                for fd, path in links.items()
                if os.path.lexists(path) and str(disk.path) in os.readlink(path)
            ]

        wait_until(lambda: not held())
        disk.behave("")
        for path in (tmp_path / "backing").rglob("extents/**/*"):  # what is filled anew comes and goes in tmp
            if path.is_file() and path.stat().st_size >= EXTENT:
                path.chmod(0o600)
                path.write_bytes(bytes(path.stat().st_size))  # as the disk has them
        assert wrong(batches) == 0
        assert wrong(batches) == 0
        data.opened.close()


def test_a_disk_that_has_no_room_at_the_commit_is_full_for_a_while(
    tmp_path: Path, environment: Callable[..., Daemon]
) -> None:
    """Thin volumes, quotas and some file systems report no room only then: the write itself succeeded."""
    with FaultyDisk(tmp_path) as disk, environment(disk.path, "--ram", "2MiB") as daemon:
        data = opened(tmp_path)
        disk.behave("fsync:/tmp/ enospc")
        with Control(daemon.socket_dir) as control:
            grants = DaemonGrants(daemon.socket_dir, DatasetId(data.version))

            def read() -> list[str]:
                found = []
                for extent in range(EXTENTS):
                    answer = granted(grants, extent)
                    assert contents(answer) == BODY[extent * EXTENT :][:EXTENT]
                    found.append(answer.origin)
                    grants.release([extent])
                return found

            read()
            tier = next(each for each in control.status().tiers if each.name != "ram")
            wait_until(lambda: read() == ["ram"] * EXTENTS)
            tier = next(each for each in control.status().tiers if each.name != "ram")
            assert (tier.budget_bytes, tier.used_bytes, tier.lost) == (0, 0, False)
            disk.behave("")
            assert daemon.log.count("a commit failed") >= 1
            grants.close()
        data.opened.close()


# ---- in the reader


@pytest.fixture(params=["ram", "nvme"])
def reader(
    tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[tuple[ExtentReader, MemoryGrants, np.ndarray]]:
    """A reader that has read all records once, its grants, and the records."""
    records = np.frombuffer(BODY, np.uint8).reshape(-1, RECORD)
    (tmp_path / "r.bin").write_bytes(BODY)
    catalog = compiled(
        tmp_path / "r.bin", tmp_path, format="records", record_bytes=RECORD, extent_bytes=EXTENT
    ).catalog()
    grants = MemoryGrants(catalog.extent, request.param)
    found = ExtentReader(catalog, grants)
    assert (read(found, np.arange(len(records))) == records).all()
    yield found, grants, records
    found.close()
    assert not any(grants.leases.values())


def read(reader: ExtentReader, samples: np.ndarray) -> np.ndarray:
    first, last = reader.spans(samples * RECORD, np.full(len(samples), RECORD))
    return reader.gather(samples, first, last).view(np.uint8).reshape(-1, RECORD)


Reading = tuple[ExtentReader, MemoryGrants, np.ndarray]


def test_recalled_extents_are_released_at_once_and_no_others(reader: Reading) -> None:
    found, grants, records = reader
    found.release_when_unused([1, 2, EXTENTS + 5])
    assert [grants.leases[extent] for extent in range(EXTENTS)] == [1, 0, 0, 1, 1, 1, 1, 1]
    assert (read(found, np.arange(len(records))) == records).all()
    assert set(grants.leases.values()) == {1}


def test_a_recalled_extent_that_a_read_needs_is_released_after_it(reader: Reading) -> None:
    found, grants, records = reader
    extents = np.array([1, 3])
    use, _ = found._leases.begin(extents, extents)
    if grants._origin == "nvme":
        assert found._leases.ensure(use, extents.tolist())
    found.release_when_unused([1, 2])
    assert (grants.leases[1], grants.leases[2]) == (1, 0)
    found._leases.end(use)
    assert (grants.leases[1], grants.leases[3]) == (0, 1)
    assert (read(found, np.arange(len(records))) == records).all()


def test_an_extent_recalled_before_its_grant_is_released_after_the_read(
    reader: Reading, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, grants, records = reader
    found.release_when_unused([1])
    acquire = grants.acquire

    def recalled_meanwhile(extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        found.release_when_unused(extents)
        return acquire(extents, timeout_s)

    monkeypatch.setattr(grants, "acquire", recalled_meanwhile)
    assert (read(found, np.arange(len(records))) == records).all()
    assert [grants.leases[extent] for extent in range(EXTENTS)] == [1, 0, 1, 1, 1, 1, 1, 1]
    monkeypatch.undo()
    assert (read(found, np.arange(len(records))) == records).all()
    assert set(grants.leases.values()) == {1}


@pytest.mark.slow
def test_threads_read_on_while_extents_are_recalled(reader: Reading) -> None:
    found, grants, records = reader
    over, asked = threading.Event(), grants.calls

    def reads(seed: int) -> bool:
        rng, right = np.random.default_rng(seed), True
        while not over.is_set():
            samples = rng.integers(0, len(records), 64)
            right = right and bool((read(found, samples) == records[samples]).all())
        return right

    with ThreadPoolExecutor(3) as pool:
        running = [pool.submit(reads, seed) for seed in range(3)]
        for extent in itertools.cycle(range(EXTENTS)):
            found.release_when_unused([extent])
            if grants.calls > asked + 12 or any(one.done() for one in running):
                break
        over.set()
    assert all(one.result() for one in running)
