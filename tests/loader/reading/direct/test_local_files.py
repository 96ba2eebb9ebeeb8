"""Local files that are read in place, or from copies where samples are small, and are written to meanwhile."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import NotFound, SourceChanged, SourceUnavailable
from cachesvc.core.order.epoch_order import Plan
from loader import DataLoader, Dataset, open_dataset
from loader.reading.direct.direct_access import copy_budget, direct_access
from loader.reading.reader import ExtentReader
from tests.support import datasets
from tests.support.descriptors import descriptors
from tests.support.training.loader_fakes import compiled
from tests.support.waiting import wait_until

COUNT = 20
NUMBERS = 8192
"""In a record, which is thereby too large to be copied."""
OTHER = 7777
SMALL, SMALL_COUNT, EXTENT = 2048, 2000, 64 << 10
"""Bytes of a small record and of an extent of them."""


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.setattr("loader.reading.changed_files.CHECK_EVERY_S", 0.0)
    for at, name in enumerate("ab"):
        rows = np.repeat(np.arange(at * COUNT, (at + 1) * COUNT, dtype="<u4"), NUMBERS)
        datasets.array_file(tmp_path / f"data/{name}.bin", rows)
    return tmp_path / "data"


@pytest.fixture
def small(data: Path) -> Path:
    """A folder of one file of small records."""
    rows = np.repeat(np.arange(SMALL_COUNT, dtype="<u4"), SMALL // 4)
    datasets.array_file(data / "../small/a.bin", rows)
    return data.parent / "small"


def small_loader(small: Path, record_bytes: int = SMALL, **arguments: Any) -> DataLoader[Any]:
    dataset = open_dataset(small, format="records", record_bytes=record_bytes, extent_bytes=EXTENT)
    return DataLoader(dataset, 8, **{"shuffle": True, "window": 4 * EXTENT, **arguments})


def opened(data: Path) -> Dataset:
    return open_dataset(data, format="records", record_bytes=4 * NUMBERS, extent_bytes=16 * NUMBERS)


def overwrite(file: Path) -> None:
    """Overwrite a file in place, at the same length."""
    with open(file, "r+b") as writing:
        writing.write(np.full(COUNT * NUMBERS, OTHER, "<u4").tobytes())
    os.utime(file, ns=(1, 1))  # clocks of file systems tick every 4 ms


def cut(file: Path) -> None:
    os.truncate(file, 3000)


def numbers(loader: DataLoader) -> list[int]:
    return [n for batch in loader for n in batch[: loader.valid].numpy().view("<u4")[:, 0].tolist()]


@pytest.mark.parametrize("write", [overwrite, cut])
@pytest.mark.parametrize("workers", [0, 1])
def test_of_a_file_that_is_written_to_nothing_more_is_read(
    data: Path, write: Callable[[Path], None], workers: int
) -> None:
    loader = DataLoader(
        opened(data), 4, shuffle=True, num_workers=workers, persistent_workers=workers > 0, on_error="skip"
    )
    assert sorted(numbers(loader)) == list(range(2 * COUNT))
    write(data / "b.bin")
    assert sorted(numbers(loader)) == list(range(COUNT))
    assert len(loader.bad_samples) == COUNT
    assert all("SourceChanged" in bad.cause and "b.bin" in bad.cause for bad in loader.bad_samples)
    loader.on_error = "raise"
    with pytest.raises(SourceChanged, match=r"b\.bin changed"):
        numbers(loader)


def test_a_file_that_is_cut_after_the_look_is_an_error_of_the_source(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loader.reading.changed_files.CHECK_EVERY_S", 3600.0)
    dataset = opened(data)
    for _ in range(2):  # the second one looks, once an hour
        assert len(dataset.__getitems__(range(2 * COUNT))) == 2 * COUNT
    cut(data / "b.bin")
    for _ in range(2):
        with pytest.raises(SourceChanged, match=r"b\.bin changed"):
            dataset[2 * COUNT - 1]
    assert len(dataset.__getitems__(range(COUNT))) == COUNT


def test_a_file_whose_bytes_stay_equal_is_read_on(data: Path) -> None:
    loader = DataLoader(opened(data), 4)
    assert numbers(loader) == list(range(2 * COUNT))
    (data / "a.bin").chmod(0o600)
    (data / "b.bin").unlink()
    assert numbers(loader) == list(range(2 * COUNT))


def test_local_files_are_read_without_a_daemon_and_a_changed_one_is_refused(home: Path) -> None:
    rows = datasets.records(home / "r.npy", 50, 3000)
    link = compiled(home / "r.npy", home, format="records", extent_bytes=8192)
    catalog = link.catalog()

    def first_row() -> bytes | None:
        reader = ExtentReader(catalog, direct_access(catalog).grants)
        addresses, lengths = catalog.locate(np.asarray([0]))
        try:
            return reader.read(addresses[:, 0], lengths[:, 0])[0]
        finally:
            reader.close()

    before = descriptors()
    assert first_row() == rows[0].tobytes()
    wait_until(lambda: descriptors() <= before)
    datasets.records(home / "r.npy", 51, 3000)
    with pytest.raises(SourceChanged):
        first_row()
    (home / "r.npy").unlink()
    with pytest.raises(NotFound):
        first_row()


def test_a_local_file_that_cannot_be_opened_is_a_typed_error(home: Path) -> None:
    (home / "data").mkdir()
    datasets.records(home / "data" / "r.npy", 50, 3000)
    catalog = compiled(home / "data", home, format="records", extent_bytes=8192).catalog()
    grants = direct_access(catalog).grants
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.dup(0)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        with pytest.raises(SourceUnavailable, match="open files"):
            grants.acquire([0], 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    (home / "data" / "r.npy").unlink()
    os.mkfifo(home / "data" / "r.npy")
    with pytest.raises(SourceChanged):
        grants.acquire([0], 1)
    shutil.rmtree(home / "data")
    (home / "data").touch()
    with pytest.raises(NotFound):
        grants.acquire([0], 1)
    grants.close()


@pytest.mark.parametrize("arguments", [{}, {"num_workers": 2}, {"num_workers": 2, "worker_type": "thread"}])
def test_small_samples_come_from_copies_each_once(small: Path, arguments: dict[str, Any]) -> None:
    batches = small_loader(small, window=64 * EXTENT, persistent_workers=arguments != {}, **arguments)

    def copied() -> int:
        assert sorted(numbers(batches)) == list(range(SMALL_COUNT))
        read = batches.stats().bytes_by_origin
        assert read["direct"] + read["local"] == SMALL_COUNT * SMALL
        return read["direct"]

    # A file is read in place until its copy is filled. The budget holds all copies.
    wait_until(lambda: copied() == SMALL_COUNT * SMALL)


@pytest.mark.parametrize(
    "arguments", [{"rank": 0, "world_size": 4, "last": "drop"}, {"record_bytes": 20 * SMALL}]
)
def test_files_are_read_in_place_for_a_small_part_and_for_large_samples(
    small: Path, arguments: dict[str, Any]
) -> None:
    batches = small_loader(small, **arguments)
    numbers(batches)
    read = batches.stats().bytes_by_origin
    assert read["local"] > 0
    assert read["direct"] == 0


def test_of_a_file_that_is_written_to_no_new_byte_is_read(small: Path) -> None:
    batches = small_loader(small)
    found = [
        n
        for batch, _ in zip(batches, range(20), strict=False)
        for n in batch.numpy().view("<u4")[:, 0].tolist()
    ]
    datasets.array_file(small / "a.bin", np.full(SMALL_COUNT * SMALL // 4, SMALL_COUNT, "<u4"))
    with pytest.raises(SourceChanged, match=r"a\.bin"):
        found.extend(n for batch in batches for n in batch.numpy().view("<u4")[:, 0].tolist())
    assert SMALL_COUNT not in found


def plan(catalog: Catalog, together: int) -> Plan:
    """A plan that reads so many extents side by side."""
    extents = np.arange(len(catalog.extent_sizes))
    step = extents // together
    return Plan(extents, step, step)


def test_the_budget_is_twice_what_is_read_side_by_side(small: Path, tmp_path: Path) -> None:
    form = {"format": "records", "record_bytes": SMALL, "extent_bytes": EXTENT}
    catalog = compiled(small, tmp_path, **form).catalog()
    size = int(catalog.extent_sizes[0])
    assert copy_budget(catalog, plan(catalog, 4), 1.0) == 8 * size
    assert copy_budget(catalog, plan(catalog, 4), 0.5) == 8 * size
    assert copy_budget(catalog, plan(catalog, 4), 0.25) == 0
    assert copy_budget(catalog, plan(catalog, 4), 1.0, most=8 * size - 1) == 0
