"""Warnings of rank 0 at the beginning of a run."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from loader import DataLoader, open_dataset
from loader.datasets.dataset import Dataset

SAMPLES, CLASSES = 400, 20


@pytest.fixture
def labelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], Dataset]:
    """A tar of 49 extents, whose samples are sorted by class or not."""
    monkeypatch.setenv("CACHESVC", "off")

    def made(by_class: bool) -> Dataset:
        labels = [n * CLASSES // SAMPLES if by_class else n * 7 % CLASSES for n in range(SAMPLES)]
        folder = tmp_path / str(by_class)
        folder.mkdir()
        rows = "".join(f"{n:05},class{label:02}\n" for n, label in enumerate(labels))
        (folder / "truth.csv").write_text(f"file,label\n{rows}")
        with tarfile.open(folder / "a.tar", "w") as tar:
            for n in range(SAMPLES):
                entry = tarfile.TarInfo(f"{n:05}.bin")
                entry.size = 700
                tar.addfile(entry, io.BytesIO(bytes(700)))
        return open_dataset(folder, extent_bytes=16 << 10, labels="truth.csv")

    return made


def warnings(caplog: pytest.LogCaptureFixture, dataset: Dataset, **given: object) -> list[str]:
    caplog.clear()
    next(iter(DataLoader(dataset, 8, shuffle=True, **given)))  # type: ignore[arg-type]
    return [record.getMessage() for record in caplog.records if "sorted" in record.getMessage()]


def test_sorted_labels_are_warned_of_where_a_window_mixes_few_classes(
    labelled: Callable[[bool], Dataset], caplog: pytest.LogCaptureFixture
) -> None:
    by_class = labelled(True)
    (line,) = warnings(caplog, by_class, window=64 << 10)
    assert "the 4 extents of a window have" in line
    assert f"of {CLASSES} classes" in line
    assert "window='all'" in line
    assert not warnings(caplog, by_class, window="all")
    assert not warnings(caplog, labelled(False), window=64 << 10)
