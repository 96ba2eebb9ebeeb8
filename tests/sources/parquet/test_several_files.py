"""Parquet of several files: columns by name, the wider type, folders as columns, and `fields=` that fetch no more."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cachesvc.__main__ import run
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options, fields_text
from cachesvc.client.control import Control
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.fetch import Fetcher
from cachesvc.sources.parquet.decoding import FOOTERS
from cachesvc.sources.source import OnReceived, ignore_received
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.support.catalog_reader import Folder, compiled


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "off")


def files(folder: Path, *tables: pa.Table) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, table in enumerate(tables):
        pq.write_table(table, folder / f"{number}.parquet")
    return folder


def test_columns_are_matched_by_name(tmp_path: Path) -> None:
    first = pa.table({"a": pa.array([1, 2], pa.int32()), "b": ["x", "y"], "nothing": pa.nulls(2)})
    second = pa.table({"extra": [1.5], "b": [None], "nothing": ["now"], "a": pa.array([2**40], pa.int64())})
    dataset = open_dataset(files(tmp_path / "d", first, second))
    assert list(dataset) == [
        {"a": 1, "b": "x", "nothing": None, "extra": None},
        {"a": 2, "b": "y", "nothing": None, "extra": None},
        {"a": 2**40, "b": None, "nothing": "now", "extra": 1.5},
    ]
    (batch,) = DataLoader(open_dataset(tmp_path / "d", fields=("a", "nothing")), 3, collate_fn=list)
    assert batch == [(1, None), (2, None), (2**40, "now")]


UNITED: list[tuple[pa.DataType, Sequence[Any], pa.DataType, Sequence[Any]]] = [
    (pa.int8(), [1, None], pa.int64(), [2**60]),
    (pa.int64(), [2**53, None], pa.float64(), [0.5]),
    (pa.float32(), [0.5], pa.float64(), [0.1]),
    (pa.string(), ["a", None], pa.large_string(), ["b"]),
    (pa.dictionary(pa.int8(), pa.string()), ["a", "b", "a"], pa.string(), ["c", None]),
    (pa.string_view(), ["a" * 20, None], pa.string(), ["b"]),
    (pa.list_(pa.int32()), [[1], None], pa.large_list(pa.int64()), [[2**40]]),
    (pa.list_(pa.string()), [["a"], []], pa.list_(pa.null()), [[], None, [None]]),
    (pa.list_(pa.int8(), 2), [[1, 2], None], pa.list_(pa.int8()), [[3], []]),
    (
        pa.struct([("x", pa.int8())]),
        [{"x": 1}],
        pa.struct([("y", pa.string()), ("x", pa.int32())]),
        [{"y": "a", "x": 9}],
    ),
    (pa.timestamp("ms"), [5], pa.timestamp("us"), [7]),
    (pa.decimal128(5, 2), [1, None], pa.decimal128(9, 4), [2]),
    (pa.null(), [None], pa.map_(pa.string(), pa.int8()), [[("a", 1)]]),
]


@pytest.mark.parametrize(("kind", "values", "other", "others"), UNITED, ids=lambda each: str(each)[:20])
def test_types_unite(tmp_path: Path, kind: Any, values: Any, other: Any, others: Any) -> None:
    given = pa.table({"x": pa.array(values, kind)}), pa.table({"x": pa.array(others, other)})
    for name, order in (("d", (0, 1)), ("e", (1, 0))):
        dataset = open_dataset(files(tmp_path / name, *(given[at] for at in order)))
        united = [given[at].cast(pa.schema([("x", plain(given[at]["x"].type))])) for at in order]
        expected = pa.concat_tables(united, promote_options="permissive").to_pylist()
        found = [value.tolist() if isinstance(value, np.ndarray) else value for value in dataset]
        assert found == [row["x"] for row in expected]


def plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of the same values that pyarrow unites with others."""
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.string() if kind == pa.string_view() else kind


def test_a_number_that_the_wider_type_does_not_hold_is_an_error(tmp_path: Path) -> None:
    dataset = open_dataset(files(tmp_path / "d", pa.table({"x": [2**53 + 1]}), pa.table({"x": [0.5]})))
    with pytest.raises(CorruptData, match=r"0\.parquet.* 9007199254740993"):
        dataset[0]


def test_a_field_that_no_file_has_is_named(tmp_path: Path) -> None:
    folder = files(tmp_path / "d", pa.table({"a": [1], "in": [{"x": 1}]}))
    for name in ("c", "in.y", "a.b"):
        with pytest.raises(InvalidInput, match=rf"fields \['{name}'\] are not in .*/d, which has a, in"):
            open_dataset(folder, fields=name)
    assert open_dataset(folder, fields=("in.x", "a", "in"))[0] == (1, 1, {"x": 1})


def test_folders_are_columns(tmp_path: Path) -> None:
    for number, where in enumerate(
        ("year=2020/lang=de", "year=2021/lang=a%20b", "year=-7/lang=__HIVE_DEFAULT_PARTITION__")
    ):
        files(tmp_path / "d" / where, pa.table({"a": [number, number]}))
    dataset = open_dataset(tmp_path / "d")
    assert list(dataset.where("year > 2000 and lang == 'a b'")) == [{"a": 1, "year": 2021, "lang": "a b"}] * 2
    assert list(dataset.where("year == -7")) == [{"a": 2, "year": -7, "lang": None}] * 2
    pairs = [(-7, 2), (2020, 0), (2021, 1)]
    assert sorted(set(open_dataset(tmp_path / "d", fields=("year", "a")))) == pairs
    assert sorted(set(open_dataset(tmp_path / "d", fields=("year",)))) == [(year,) for year, _ in pairs]
    (batch,) = DataLoader(open_dataset(tmp_path / "d", fields=("year", "a")), 6)
    assert sorted(batch[0].tolist()) == [-7, -7, 2020, 2020, 2021, 2021]


@pytest.mark.parametrize(
    ("folder", "name", "tag"),
    [
        ("2nd=x", "2nd", "_2nd"),
        ("größe=x", "größe", "größe"),
        ("%24id=x", "$id", "_id"),
        ("a-b.c=x", "a-b.c", "a_b_c"),
    ],
)
def test_names_of_such_columns_may_begin_with_any_letter_or_digit(
    tmp_path: Path, folder: str, name: str, tag: str
) -> None:
    files(tmp_path / "d" / folder, pa.table({"a": [1]}))
    files(tmp_path / "d" / folder.replace("=x", "=y"), pa.table({"a": [2]}))
    dataset = open_dataset(tmp_path / "d")
    assert list(dataset) == [{"a": 1, name: "x"}, {"a": 2, name: "y"}]
    assert list(dataset.where(f"{tag} == 'y'")) == [{"a": 2, name: "y"}]


def test_a_column_in_the_file_comes_before_one_of_its_folder(tmp_path: Path) -> None:
    for year in (2020, 2021):
        files(tmp_path / "d" / f"year={year}", pa.table({"year": [1]}))
    dataset = open_dataset(tmp_path / "d")
    assert (list(dataset), len(dataset.where("year == 2021"))) == ([1, 1], 1)


class Counting(Folder):
    """Counts the bytes and the reads of each file."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        self.bytes += len(into)
        super().read_into(version, offset, into)


def filled(catalog: Catalog, source: Counting) -> None:
    """Fill all extents of a catalog as a new process does."""
    fetcher = Fetcher(lambda uri: source, threads=2)
    FOOTERS.forget()
    for index in range(len(catalog.extent_sizes)):
        fd = os.memfd_create("extent")
        fetcher.fetch(catalog.extent(index), fd)
        os.close(fd)
    fetcher.close()


def test_fields_fetch_the_bytes_of_their_columns_alone_and_the_footer_once(tmp_path: Path) -> None:
    count = 20_000
    columns = {
        "small": range(count),
        "in": [{"a": n % 7, "big": os.urandom(50)} for n in range(count)],
        "big": [os.urandom(50) for _ in range(count)],
    }
    path = files(tmp_path / "d", pa.table(columns)) / "0.parquet"
    pq.write_table(pa.table(columns), path, row_group_size=1000, compression="none")
    metadata = pq.read_metadata(path)
    footer = metadata.serialized_size + 8
    for fields, leaves in ((("small",), [0]), (("in.a", "small"), [0, 1]), ((), [0, 1, 2, 3])):
        catalog = compiled(
            tmp_path / "d", Options(extent_bytes=1 << 17, fields=fields_text(fields) if fields else "")
        )
        source = Counting()
        filled(catalog, source)
        wanted = sum(metadata.row_group(g).column(c).total_compressed_size for g in range(20) for c in leaves)
        assert wanted == catalog.stored_bytes
        assert source.bytes == wanted + footer
        assert len(catalog.extent_sizes) > 1


def test_any_order_of_fields_is_one_dataset(tmp_path: Path) -> None:
    folder = files(tmp_path / "d", pa.table({"a": [1], "b": [2], "c": [3]}))
    versions = {
        open_dataset(folder, fields=names).version for names in (("a", "b"), ("b", "a"), ("a", "b", "a"))
    }
    assert len(versions) == 1
    assert open_dataset(folder).version not in versions
    assert open_dataset(folder, fields=("b", "a", "b"))[0] == (2, 1, 2)


def test_fields_that_were_prefetched_are_not_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = files(
        tmp_path / "d", pa.table({"a": range(100), "b": [f"{n}" for n in range(100)], "c": range(100)})
    )
    monkeypatch.delenv("CACHESVC")
    with Daemon(
        tmp_path / "node", ["--ram", "16MiB", "--extent-bytes", "1MiB", "--allow", str(tmp_path)]
    ) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        assert run(["prefetch", str(folder), "--fields", "c,a"]) == 0
        dataset = open_dataset(folder, fields=("a", "c"))
        with Control(daemon.socket_dir) as control:
            assert [each.dataset.id for each in control.list()] == [dataset.version]
            assert control.list()[0].resident_bytes == dataset.catalog.extent_sizes.sum()
        assert dataset[7] == (7, 7)
