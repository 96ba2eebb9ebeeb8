"""Local files that are read in place, and are written to meanwhile."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cachesvc.core.errors import NotFound, SourceChanged, SourceUnavailable
from loader import DataLoader, Dataset, open_dataset
from loader.reading.direct.direct_access import direct_access
from loader.reading.reader import ExtentReader
from tests.support import datasets
from tests.support.descriptors import descriptors
from tests.support.training.loader_fakes import compiled
from tests.support.waiting import wait_until

COUNT = 20
OTHER = 7777


@pytest.fixture(autouse=True)
def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the small files of these tests read as large samples are."""
    monkeypatch.setattr("loader.reading.direct.local_copies.SMALL_SAMPLE_BYTES", 0)


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.setattr("loader.reading.changed_files.CHECK_EVERY_S", 0.0)
    for at, name in enumerate("ab"):
        rows = np.repeat(np.arange(at * COUNT, (at + 1) * COUNT, dtype="<u4"), 512)
        datasets.array_file(tmp_path / f"data/{name}.bin", rows)
    return tmp_path / "data"


def opened(data: Path) -> Dataset:
    return open_dataset(data, format="records", record_bytes=2048, extent_bytes=8192)


def overwrite(file: Path) -> None:
    """Overwrite a file in place, at the same length."""
    with open(file, "r+b") as writing:
        writing.write(np.full(COUNT * 512, OTHER, "<u4").tobytes())
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
