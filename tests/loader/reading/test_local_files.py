"""Local files that are read where they lie, and are written to meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from cachesvc.core.errors import SourceChanged
from loader import DataLoader, Dataset, open_dataset
from tests.support import datasets

COUNT = 20
OTHER = 7777


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("CACHESVC_SOCKET", str(tmp_path / "nobody"))
    monkeypatch.setattr("loader.reading.changed_files.LOOK_S", 0.0)
    for at, name in enumerate("ab"):
        rows = np.repeat(np.arange(at * COUNT, (at + 1) * COUNT, dtype="<u4"), 512)
        datasets.array_file(tmp_path / f"data/{name}.bin", rows)
    return tmp_path / "data"


def opened(data: Path) -> Dataset:
    return open_dataset(data, format="records", record_bytes=2048, extent_bytes=8192)


def overwrite(file: Path) -> None:
    """In place, at the same length."""
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
    monkeypatch.setattr("loader.reading.changed_files.LOOK_S", 3600.0)
    dataset = opened(data)
    for _ in range(2):  # the second one looks, once an hour
        assert len(dataset.__getitems__(range(2 * COUNT))) == 2 * COUNT
    cut(data / "b.bin")
    for _ in range(2):
        with pytest.raises(SourceChanged, match=r"b\.bin changed"):
            dataset[2 * COUNT - 1]
    assert len(dataset.__getitems__(range(COUNT))) == COUNT


def test_what_leaves_the_bytes_as_they_are_changes_nothing(data: Path) -> None:
    loader = DataLoader(opened(data), 4)
    assert numbers(loader) == list(range(2 * COUNT))
    (data / "a.bin").chmod(0o600)
    (data / "b.bin").unlink()
    assert numbers(loader) == list(range(2 * COUNT))
