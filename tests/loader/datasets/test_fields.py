"""`fields=` names the values of a sample, in that order, whatever their order in the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from loader import DataLoader, open_dataset
from tests.support import datasets

NAMES = ("a", "b", "c")
COUNT = 6
ROWS = [{name: f"{name}{row}".encode() for name in NAMES} for row in range(COUNT)]
CHOSEN = [fields for count in (1, 2, 3) for fields in product(NAMES, repeat=count)]


def in_tars(root: Path) -> None:
    datasets.write_files(root, {"0.tar": datasets.tar_bytes({f"{n}": row for n, row in enumerate(ROWS)})})


def in_mds(root: Path, compression: str = "") -> None:
    datasets.mds_shards(root, dict.fromkeys(NAMES, "bytes"), ROWS, 4, compression)


def in_parquet(root: Path) -> None:
    root.mkdir()
    parquet.write_table(
        pyarrow.table({name: [row[name] for row in ROWS] for name in NAMES}), root / "0.parquet"
    )


def in_files(root: Path) -> None:
    datasets.write_files(root, {f"{n}.{name}": row[name] for n, row in enumerate(ROWS) for name in NAMES})


KINDS: Mapping[str, Callable[[Path], None]] = {
    "webdataset": in_tars,
    "mds": in_mds,
    "mds, zstd": lambda root: in_mds(root, "zstd"),
    "parquet": in_parquet,
    "files": in_files,
}


@pytest.mark.parametrize("kind", KINDS)
def test_values_come_in_the_order_of_fields(tmp_path: Path, kind: str) -> None:
    KINDS[kind](tmp_path / "data")
    for fields in CHOSEN:
        data = open_dataset(tmp_path / "data", format=kind.partition(",")[0], fields=fields, decode=None)
        expected = sorted(tuple(row[name] for name in fields) for row in ROWS)
        assert sorted(data[n] for n in range(COUNT)) == expected
        assert (
            sorted(sample for batch in DataLoader(data, 4, collate_fn=list) for sample in batch) == expected
        )


def labelled(root: Path) -> list[tuple[bytes, bytes, int]]:
    rows = [(f"jpg{n}".encode(), f"txt{n}".encode(), n % 2) for n in range(COUNT)]
    for n, (image, text, label) in enumerate(rows):
        folder = ("cat", "dog")[label]
        datasets.write_files(root, {f"{folder}/{n}.jpg": image, f"{folder}/{n}.txt": text})
    return rows


@pytest.mark.parametrize(
    "fields", [("label", "txt", "jpg"), ("txt", "label", "jpg"), ("jpg", "txt", "label")]
)
def test_labels_come_in_the_order_of_fields(tmp_path: Path, fields: Sequence[str]) -> None:
    by_name = [dict(zip(("jpg", "txt", "label"), row, strict=True)) for row in labelled(tmp_path / "data")]
    data = open_dataset(tmp_path / "data", fields=fields, decode=None)
    found = sorted((data[n] for n in range(COUNT)), key=repr)
    assert found == sorted((tuple(row[name] for name in fields) for row in by_name), key=repr)


@pytest.mark.parametrize("decode", ["auto", None])
def test_a_value_of_the_catalog_may_be_a_sample(tmp_path: Path, decode: Any) -> None:
    labels = [label for _, _, label in labelled(tmp_path / "data")]
    assert sorted(open_dataset(tmp_path / "data", fields="label", decode=decode)) == sorted(labels)


def test_each_value_is_decoded_by_its_own_field(tmp_path: Path) -> None:
    rows = [{"json": b'{"n": %d}' % n, "txt": b"text %d" % n} for n in range(COUNT)]
    datasets.write_files(
        tmp_path / "data", {"0.tar": datasets.tar_bytes({f"{n}": row for n, row in enumerate(rows)})}
    )
    for fields in (("json", "txt"), ("txt", "json")):
        values = {"json": {"n": 3}, "txt": "text 3"}
        assert open_dataset(tmp_path / "data", fields=fields)[3] == tuple(values[name] for name in fields)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("workers", [0, 2])
def test_one_name_alone_makes_a_sample_its_value(tmp_path: Path, kind: str, workers: int) -> None:
    KINDS[kind](tmp_path / "data")
    data = open_dataset(tmp_path / "data", format=kind.partition(",")[0], fields="b", decode=None)
    expected = sorted(row["b"] for row in ROWS)
    assert sorted(bytes(data[at]) for at in range(COUNT)) == expected
    batches = DataLoader(data, batch_size=4, num_workers=workers, collate_fn=list)
    assert sorted(bytes(each) for batch in batches for each in batch) == expected


def test_a_batch_of_one_named_column_is_its_tensor(tmp_path: Path) -> None:
    parquet.write_table(pyarrow.table({"a": [1, 2, 3], "b": [4, 5, 6]}), tmp_path / "0.parquet")
    (batch,) = DataLoader(open_dataset(tmp_path, fields="b"), batch_size=3)
    assert batch.tolist() == [4, 5, 6]
    data = open_dataset(tmp_path, fields="b", transform=lambda value: value * 2)
    assert list(data) == [8, 10, 12]
