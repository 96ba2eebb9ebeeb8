"""TFRecord as the `tfrecord` package writes it, with and without its index, and as it reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from loader import open_dataset

tfrecord = pytest.importorskip("tfrecord", reason="no tfrecord here: `make compat` installs it")

COUNT = 80


def written(path: Path) -> Path:
    writer = tfrecord.TFRecordWriter(str(path))
    for n in range(COUNT):
        writer.write(
            {
                "image": (bytes([n]) * n * 100, "byte"),
                "label": (n - 40, "int"),
                "scores": ([n / 2, -1.5], "float"),
                "ids": (list(range(n % 5)), "int"),
            }
        )
    writer.close()
    return path


def as_text(row: Any) -> str:
    values = {name: getattr(row[name], "tolist", lambda name=name: row[name])() for name in ("scores", "ids")}
    label = row["label"]
    return repr((bytes(row["image"]), int(label[0] if hasattr(label, "__len__") else label), values))


@pytest.mark.parametrize("indexed", [False, True])
def test_examples_are_those_of_the_tfrecord_package(tmp_path: Path, indexed: bool) -> None:
    (tmp_path / "d").mkdir()
    path, index = written(tmp_path / "d" / "a.tfrecord"), None
    if indexed:
        from tfrecord.tools.tfrecord2idx import create_index

        index = str(path.with_suffix(".index"))
        create_index(str(path), index)
    theirs = tfrecord.tfrecord_loader(str(path), index)  # with an index it begins at a random record
    assert sorted(map(as_text, open_dataset(path.parent))) == sorted(map(as_text, theirs))
