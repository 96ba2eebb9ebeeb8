"""Parquet: rows come back as they were written, opening reads footers alone, and what is not read is said."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.__main__ import run
from cachesvc.catalog.build import DirectBytes, Options
from cachesvc.catalog.formats.parquet import compile_parquet
from cachesvc.catalog.inputs import Entry, Inputs
from cachesvc.core.errors import CorruptData, InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.parquet.parquet import FOOTER_BYTES, Footer
from cachesvc.sources.parquet.thrift import read_struct
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.support.catalog_reader import Folder, compiled
from tests.support.datasets import write_files

ROWS = 3000


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "off")


def everything(rows: int = ROWS) -> pa.Table:
    """A column of each type that is read, with nulls where a type has them, and two of types that are not."""
    images = [{"bytes": os.urandom(n % 50), "path": f"{n}.jpg"} if n % 5 else None for n in range(rows)]
    lists = [list(range(n % 7)) if n % 11 else None for n in range(rows)]
    pairs = [[n / 2, -n / 4] if n % 3 else None for n in range(rows)]
    return pa.table(
        {
            "text": [("cat", "dog", "eel", None)[n % 4] for n in range(rows)],
            "large": pa.array([f"ü{n % 9}" for n in range(rows)], pa.large_string()),
            "five": pa.array([b"%05d" % n for n in range(rows)], pa.binary(5)),
            "some": pa.array([b"%03d" % (n % 99) if n % 3 else None for n in range(rows)], pa.binary(3)),
            "image": images,
            "label": pa.array([n % 10 if n % 13 else None for n in range(rows)], pa.int64()),
            "small": pa.array([n % 200 for n in range(rows)], pa.uint8()),
            "float": pa.array([n / 8 for n in range(rows)], pa.float32()),
            "half": pa.array([np.float16(n % 16) for n in range(rows)], pa.float16()),
            "flag": [bool(n % 3) if n % 4 else None for n in range(rows)],
            "ids": pa.array(lists, pa.list_(pa.int32())),
            "pair": pa.array(pairs, pa.list_(pa.float64(), 2)),
            "holes": pa.array([[n, None, n][: n % 4] for n in range(rows)], pa.list_(pa.int16())),
            "flags": pa.array([[True, n % 2 == 0] for n in range(rows)], pa.list_(pa.bool_())),
            "kind": pa.array([("a", "b")[n % 2] for n in range(rows)]).dictionary_encode(),
            "code": pa.array([n % 3 for n in range(rows)]).dictionary_encode(),
            "when": pa.array(range(rows), pa.timestamp("us")),
            "words": pa.array([["a", "b"]] * rows),
        }
    )


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    """What a sample of each row should be."""
    found = []
    for row in table.drop_columns([c for c in ("when", "words") if c in table.column_names]).to_pylist():
        if isinstance(row.get("image"), dict):
            row.update({f"image.{name}": value for name, value in row["image"].items()})
        row.pop("image", None)
        found.append({name: value for name, value in row.items() if value is not None})
    return found


def same(samples: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Equal, and of the same types."""
    assert len(samples) == len(rows)
    for sample, row in zip(samples, rows, strict=True):
        plain = {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in sample.items()}
        assert plain == row
        assert {k: type(v) for k, v in plain.items()} == {k: type(v) for k, v in row.items()}


@pytest.mark.parametrize(
    "writing",
    [
        {},
        {"compression": "zstd", "data_page_version": "2.0", "write_page_checksum": True},
        {"compression": "none", "use_dictionary": False, "store_schema": False},
        {"dictionary_pagesize_limit": 64, "data_page_size": 512},  # dictionaries that are given up half-way
    ],
    ids=lambda writing: ",".join(writing) or "default",
)
def test_rows_come_back_as_they_were_written(tmp_path: Path, writing: dict[str, Any]) -> None:
    table = everything()
    for name, part in (("a", table), ("b", table.slice(100, 777))):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=500, **writing)
    dataset = open_dataset(tmp_path, extent_bytes=1 << 19)
    notes = " ".join(dataset.catalog.notes)
    assert "when (timestamp[us])" in notes
    assert "words (list<" in notes
    rows = rows_of(table) + rows_of(table.slice(100, 777))
    if not writing.get("store_schema", True):  # Parquet alone knows no dictionaries, and no lists of one size
        assert {field.name: field.encoding for field in dataset.catalog.fields}["kind"] == "str"
    same([dataset[n] for n in range(len(dataset))], rows)
    assert dataset.catalog.extent_sizes.max() <= 1 << 19
    assert len(dataset.catalog.extent_sizes) > 2
    keys = {dataset.catalog.key(n) for n in range(len(dataset))}
    assert keys == {f"a.parquet:{n}" for n in range(ROWS)} | {f"b.parquet:{n}" for n in range(777)}


VALUES = {
    "text": (pa.string(), st.none() | st.text(max_size=6)),
    "bytes": (pa.binary(), st.none() | st.binary(max_size=6) | st.sampled_from([b"", b"x" * 500])),
    "int": (pa.int16(), st.none() | st.integers(-(2**15), 2**15 - 1)),
    "flag": (pa.bool_(), st.none() | st.booleans()),
    "ids": (
        pa.list_(pa.int64()),
        st.none() | st.lists(st.none() | st.integers(-(2**63), 2**63 - 1), max_size=20),
    ),
    "flags": (pa.large_list(pa.bool_()), st.none() | st.lists(st.none() | st.booleans(), max_size=4)),
    "two": (
        pa.list_(pa.int8(), 2),
        st.none() | st.lists(st.none() | st.integers(-128, 127), min_size=2, max_size=2),
    ),
    "in": (
        pa.struct([("s", pa.string()), ("n", pa.int32())]),
        st.none()
        | st.fixed_dictionaries({"s": st.none() | st.text(max_size=3), "n": st.none() | st.just(7)}),
    ),
}


@settings(max_examples=60, deadline=None, database=None)
@given(
    st.lists(
        st.fixed_dictionaries({name: values for name, (_, values) in VALUES.items()}), min_size=1, max_size=40
    ),
    st.integers(1, 45),
    st.sampled_from([4096, 8192, 1 << 20]),
    st.booleans(),
    st.sampled_from(["none", "snappy", "zstd"]),
    st.booleans(),
)
def test_any_rows_in_any_groups(
    tmp_path_factory: pytest.TempPathFactory,
    rows: list[dict[str, Any]],
    group: int,
    extent_bytes: int,
    dictionary: bool,
    compression: str,
    statistics: bool,
) -> None:
    path = tmp_path_factory.mktemp("d") / "a.parquet"
    table = pa.table(
        {name: pa.array([row[name] for row in rows], kind) for name, (kind, _) in VALUES.items()}
    )
    pq.write_table(
        table,
        path,
        row_group_size=group,
        use_dictionary=dictionary,
        compression=compression,
        write_statistics=statistics,
    )
    dataset = open_dataset(path, extent_bytes=extent_bytes)
    expected = []
    for row in rows:
        flat = {k: v for k, v in row.items() if k != "in"} | {
            f"in.{k}": v for k, v in (row["in"] or {}).items()
        }
        expected.append({k: v for k, v in flat.items() if v is not None})
    same(list(dataset), expected)


def test_a_value_that_a_dictionary_holds_once_takes_no_more(tmp_path: Path) -> None:
    """20 GB of text in a file of 2 MB, which is that in the cache too."""
    big = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"big": big, "n": range(20_000)}), tmp_path / "a.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset.catalog.extent_sizes.sum() < 4 << 20
    assert dataset[19_999] == {"big": "x" * 1_000_000, "n": 19_999}


@pytest.mark.parametrize("dictionary", [True, False])
def test_bytes_of_one_size_count_as_often_as_they_are_there(tmp_path: Path, dictionary: bool) -> None:
    """pyarrow unfolds a dictionary of them, whatever it is asked: what that takes is known at opening."""
    column = pa.array([b"x" * 1_000_000 if n % 2 else None for n in range(50)], pa.binary(1_000_000))
    pq.write_table(
        pa.table({"big": column}), tmp_path / "a.parquet", write_statistics=False, use_dictionary=dictionary
    )
    assert (tmp_path / "a.parquet").stat().st_size < 2 << 20
    dataset = open_dataset(tmp_path)
    assert dataset.catalog.extent_sizes.tolist() == [50 * (8 + 1_000_000)]
    assert dataset[48] is None
    assert dataset[49] == b"x" * 1_000_000


def test_opening_reads_footers_alone(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for number in range(3):
        table = pa.table({"x": [os.urandom(1000) for _ in range(1000)]})
        pq.write_table(table, tmp_path / f"d/{number}.parquet", row_group_size=300)
    folder = Folder()
    catalog = compiled(tmp_path / "d", Options(extent_bytes=1 << 19), folder=folder)
    assert catalog.samples == 3000
    assert len(folder.reads) == 3
    assert len(catalog.extent_sizes) == 9
    sizes = sum(path.stat().st_size for path in (tmp_path / "d").iterdir())
    footers = sum(8 + pq.read_metadata(path).serialized_size for path in (tmp_path / "d").iterdir())
    assert catalog.stored_bytes == sizes + 2 * footers - 3 * len(
        b"PAR1"
    )  # each file's footer with each extent


def test_a_footer_larger_than_the_first_read(tmp_path: Path) -> None:
    table = pa.table({f"column {n}": range(200) for n in range(60)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    assert pq.read_metadata(tmp_path / "a.parquet").serialized_size > 64 << 10
    dataset = open_dataset(tmp_path)
    assert dataset[199] == {f"column {n}": 199 for n in range(60)}


def test_row_groups_are_not_joined_beyond_what_a_table_tells(tmp_path: Path) -> None:
    """Eight of 604 MB each, where an extent may have 8 GiB."""
    count = 1 << 26
    flags = pa.BooleanArray.from_buffers(pa.bool_(), count, [None, pa.py_buffer(bytes(count // 8))])
    with pq.ParquetWriter(tmp_path / "a.parquet", pa.schema([("x", pa.bool_())])) as writer:
        for _ in range(8):
            writer.write_table(pa.table({"x": flags}), row_group_size=count)
    catalog = compiled(tmp_path, Options(extent_bytes=8 << 30))
    assert catalog.extent_sizes.tolist() == [7 * 9 * count, 9 * count]


def test_few_footers_are_held_at_a_time(tmp_path: Path) -> None:
    """Whoever reads their row groups is slower than the source: those of 10,000 files would take gigabytes."""
    body = written(tmp_path / "x", pa.table({"x": range(3)}))
    entries = [Entry(ObjectVersion(f"s3://b/{n}.parquet", len(body), ""), f"{n}.parquet") for n in range(200)]
    asked, many = itertools.count(1), threading.Event()

    def fetch(version: ObjectVersion, offset: int, length: int) -> bytes:
        if next(asked) > 100:
            many.set()
        return body[offset : offset + length]

    def progress(done: int, total: int) -> None:
        if done == 1:
            assert not many.wait(1)

    options = Options(format="parquet", extent_bytes=4096)
    nothing = DirectBytes(lambda uri: Folder())
    draft = compile_parquet(Inputs("s3://b/", entries, options, fetch, nothing, progress))
    assert draft.extent_first[-1] == 600


def test_fields_are_chosen_and_made_tensors(tmp_path: Path) -> None:
    pq.write_table(everything(100), tmp_path / "a.parquet", row_group_size=30)
    dataset = open_dataset(tmp_path, fields=("small", "float"))
    small, value = next(iter(DataLoader(dataset, batch_size=100)))
    assert small.tolist() == list(range(100))
    assert value.tolist() == [n / 8 for n in range(100)]
    assert open_dataset(tmp_path, fields="five", decode=None)[7] == (b"00007",)


def test_rows_through_a_daemon_and_s3(
    tmp_path: Path, s3_server: Any, s3_env: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = everything()
    for name, part in (("a", table), ("b", table.slice(100, 777))):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=500)
        body = (tmp_path / f"{name}.parquet").read_bytes()
        s3_server.client().put_object(Bucket=bucket, Key=f"d/{name}.parquet", Body=body)
    monkeypatch.setenv("CACHESVC", "require")
    flags = ["--ram", "16MiB", "--extent-bytes", "1MiB", "--allow", f"s3://{bucket}/"]
    with Daemon(tmp_path / "node", flags) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        assert run(["prefetch", f"s3://{bucket}/d/"]) == 0
        dataset = open_dataset(f"s3://{bucket}/d/")
        batches = DataLoader(dataset, batch_size=100, shuffle=True, num_workers=2, collate_fn=list)
        found = [sample for batch in batches for sample in batch]
        found.sort(key=lambda sample: (sample["five"], repr(sample)))
        expected = sorted(
            rows_of(table) + rows_of(table.slice(100, 777)), key=lambda row: (row["five"], repr(row))
        )
        assert [sample["five"] for sample in found] == [row["five"] for row in expected]
        same(
            [dataset[n] for n in range(0, len(dataset), 50)],
            (rows_of(table) + rows_of(table.slice(100, 777)))[::50],
        )


def test_a_flip_in_a_page_with_a_checksum_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    path = tmp_path / "d/a.parquet"
    path.parent.mkdir()
    table = pa.table({"x": [os.urandom(1000) for _ in range(1000)]})
    pq.write_table(table, path, write_page_checksum=True, compression="none", use_dictionary=False)
    raw = bytearray(path.read_bytes())
    raw[500_000] ^= 1
    path.write_bytes(raw)
    monkeypatch.delenv("CACHESVC")
    with Daemon(
        tmp_path / "node", ["--ram", "6MiB", "--extent-bytes", "1MiB", "--allow", str(tmp_path)]
    ) as daemon:
        monkeypatch.setenv("CACHESVC_SOCKET", daemon.socket_dir)
        assert run(["prefetch", str(path.parent)]) == CorruptData.code
    assert "a.parquet cannot be read as Parquet" in capsys.readouterr().err


def written(path: Path, table: pa.Table, **writing: Any) -> bytes:
    pq.write_table(table, path, **writing)
    data = path.read_bytes()
    path.unlink()
    return data


@pytest.mark.parametrize("body", [b"\x26\x00\x00", b"\x3c\x00\x00"], ids=["none", "empty metadata"])
def test_a_footer_of_column_chunks_without_end_costs_little_memory(body: bytes) -> None:
    """pyarrow makes 750 bytes of three: a footer of 10 MiB took 2.8 GiB."""
    chunks = 500_000
    root, leaf = b"\x48\x01r\x15\x02\x00", b"\x15\x02\x25\x00\x18\x01a\x00"
    group = b"\x19\xfc" + _varint(chunks) + body * chunks + b"\x16\x02\x16\x02\x00"
    footer = b"\x15\x02\x19\x2c" + root + leaf + b"\x16\x02\x19\x1c" + group + b"\x00"
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData, match="more structs"):  # which we say: before pyarrow reads it
            Footer("s3://b/x.parquet", footer + len(footer).to_bytes(4, "little") + b"PAR1")
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def _varint(number: int) -> bytes:
    return bytes([*((number >> shift) & 127 | 128 for shift in (0, 7)), number >> 14])


def test_a_footer_that_is_too_long_is_read_by_nobody() -> None:
    """A catalog that lies beside the data may say that a footer is as long as the file."""
    long = FOOTER_BYTES + 1
    with pytest.raises(CorruptData, match="footer of 33,554,433 bytes"):
        Footer("s3://b/x.parquet", long.to_bytes(4, "little") + b"PAR1")


def test_what_is_no_parquet_is_said(tmp_path: Path) -> None:
    good = written(tmp_path / "x", pa.table({"x": ["a", "b"]}))
    footer = int.from_bytes(good[-8:-4], "little") + 8
    damaged = {
        b"": CorruptData,
        b"PAR1PAR1": CorruptData,
        good[:-1]: CorruptData,
        good[:-8] + b"\xff\xff\xff\x7fPAR1": CorruptData,
        good[:-footer] + bytes(32) + good[32 - footer :]: CorruptData,
        good[:-4] + b"PARE": InvalidInput,
        written(tmp_path / "x", pa.table({"x": pa.array([], pa.string())})): NotFound,
        written(tmp_path / "x", pa.table({"when": pa.array([1], pa.timestamp("us"))})): InvalidInput,
        written(tmp_path / "x", pa.table({"x.y": ["a"], "x": [{"y": "b"}]})): InvalidInput,
    }
    for number, (data, error) in enumerate(damaged.items()):
        write_files(tmp_path / f"d{number}", {"a.parquet": data})
        with pytest.raises(error, match=r"a\.parquet|holds no whole sample"):
            compiled(tmp_path / f"d{number}")


def test_a_column_that_is_left_out_may_be_called_as_one_that_is_read(tmp_path: Path) -> None:
    """By a path of its own, or beneath it."""
    when = pa.array([1, 2], pa.timestamp("us"))
    inside = pa.array([{"y": ["a"]}, {"y": ["b"]}])
    columns = [pa.array(["a", "b"]), when, when, pa.array([3, 4]), inside]
    table = pa.Table.from_arrays(columns, ["x", "x", "x.y", "x.y", "x"])
    pq.write_table(table, tmp_path / "a.parquet")
    same(list(open_dataset(tmp_path)), [{"x": "a", "x.y": 3}, {"x": "b", "x.y": 4}])


@pytest.mark.parametrize(
    "kind",
    [
        pa.list_(pa.int32()),
        pa.large_list(pa.float64()),
        pa.list_(pa.uint8()),
        pa.list_(pa.bool_()),
        pa.list_(pa.int64(), 3),
    ],
    ids=str,
)
def test_a_list_with_nulls_is_pythons_and_one_without_an_array(tmp_path: Path, kind: pa.DataType) -> None:
    one = (True, False) if kind.value_type == pa.bool_() else (1, 0)
    rows = [[one[0], None, one[1]], [one[0], one[1], one[0]], None, [None] * 3]
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", pa.table({"x": pa.array(rows, kind)}))})
    found = list(open_dataset(tmp_path / "d", fields="x"))
    assert (found[0], found[2], found[3]) == (([1, None, 0],), (None,), ([None] * 3,))
    assert isinstance(found[1][0], np.ndarray)
    assert found[1][0].tolist() == [1, 0, 1]


def test_lists_of_whatever_are_read_or_left_out_and_said(tmp_path: Path) -> None:
    columns = {
        "strings": pa.array([["a", None], []]),
        "nested": pa.array([[[1, None]], None]),
        "structs": pa.array([[{"a": 1}], None]),
        "times": pa.array([None, 1], pa.timestamp("us")),
        "empty": pa.array([[], None], pa.list_(pa.int32(), 0)),
        "nothing": pa.nulls(2),
        "price": pa.array([None, Decimal("1.5")]),
        "number": pa.array([1, 2]),
    }
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", pa.table(columns))})
    dataset = open_dataset(tmp_path / "d")
    assert list(dataset) == [1, 2]
    assert {note.split()[1] for note in dataset.catalog.notes} == columns.keys() - {"number"}


def tensors(shape: tuple[int, ...], permutation: list[int] | None = None) -> pa.ExtensionArray:
    count = int(np.prod(shape))
    rows = [list(range(count)), None, [float(n) for n in range(count, 2 * count)]]
    kind = pa.fixed_shape_tensor(pa.float32(), shape, permutation=permutation)
    return pa.ExtensionArray.from_storage(kind, pa.array(rows, pa.list_(pa.float32(), count)))


@pytest.mark.parametrize(
    ("shape", "permutation"),
    [((6,), None), ((2, 3), None), ((2, 3, 4), None), ((2, 3), [1, 0]), ((2, 3, 4), [2, 0, 1]), ((), None)],
)
def test_tensors_of_one_shape_come_in_it(
    tmp_path: Path, shape: tuple[int, ...], permutation: list[int] | None
) -> None:
    """`permutation` as Arrow's specification has it: the order in which sides that lie in `shape` are meant."""
    inside = pa.StructArray.from_arrays([tensors(shape, permutation)], ["t"])
    table = pa.table({"x": tensors(shape, permutation), "in": inside})
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", table)})
    rows = list(open_dataset(tmp_path / "d"))
    assert rows[1] == {}
    for row, first in ((0, 0), (2, int(np.prod(shape)))):
        right = np.arange(first, first + int(np.prod(shape)), dtype="f4").reshape(shape)
        right = right if permutation is None else right.transpose(permutation)
        for name in ("x", "in.t"):
            assert (rows[row][name].dtype, rows[row][name].shape) == (np.float32, right.shape)
            assert np.array_equal(rows[row][name], right)


def test_tensors_are_batches_and_one_with_nulls_is_nested_lists(tmp_path: Path) -> None:
    whole = tensors((2, 3)).take(pa.array([0, 2, 0]))
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", pa.table({"x": whole}))})
    (batch,) = DataLoader(open_dataset(tmp_path / "d"), batch_size=3)
    assert batch.shape == (3, 2, 3)
    storage = pa.array([[1, None, 3, 4]], pa.list_(pa.int32(), 4))
    holed = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), (2, 2)), storage)
    write_files(tmp_path / "e", {"a.parquet": written(tmp_path / "x", pa.table({"x": holed}))})
    assert open_dataset(tmp_path / "e")[0] == [[1, None], [3, 4]]


def test_what_is_not_read_is_refused(tmp_path: Path) -> None:
    one = written(tmp_path / "x", pa.table({"x": ["a"], "y": [1]}))
    other = written(tmp_path / "x", pa.table({"x": ["a"], "y": [0.5]}))
    write_files(tmp_path / "d", {"a.parquet": one, "b.parquet": other})
    with pytest.raises(
        InvalidInput, match=r"b\.parquet has other columns .*: x str, y float64, not x str, y int64"
    ):
        compiled(tmp_path / "d")
    prefixes = written(
        tmp_path / "x",
        pa.table({"x": [f"a long prefix {n}" for n in range(100)]}),
        use_dictionary=False,
        column_encoding={"x": "DELTA_BYTE_ARRAY"},
    )
    write_files(tmp_path / "e", {"a.parquet": prefixes})
    with pytest.raises(InvalidInput, match="column 'x' is encoded as DELTA_BYTE_ARRAY"):
        compiled(tmp_path / "e")
    write_files(tmp_path / "g", {"a.parquet": one, "b.tar": b""})
    with pytest.raises(InvalidInput, match=r"format= \(parquet, webdataset\)"):
        compiled(tmp_path / "g")


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", pa.table({"x": ["a"]}))})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r"pip install 'cachesvc\[parquet\]'"):
        compiled(tmp_path / "d")


def test_a_page_that_unfolds_beyond_what_its_footer_says(tmp_path: Path) -> None:
    """The footer of a file with little text, the pages of one with much."""
    little = written(
        tmp_path / "x", pa.table({"x": ["a" * 10] * 100}), use_dictionary=False, compression="none"
    )
    much = written(
        tmp_path / "x", pa.table({"x": ["b" * 1000] * 100}), use_dictionary=False, compression="none"
    )
    footer = int.from_bytes(little[-8:-4], "little") + 8
    body = much[: int.from_bytes(much[-8:-4], "little") + 8]
    write_files(tmp_path / "d", {"a.parquet": body + bytes(len(little)) + little[-footer:]})
    with pytest.raises(CorruptData, match=r"a\.parquet"):
        open_dataset(tmp_path / "d")[0]


@pytest.mark.parametrize("kind", ["text", "numbers"])
def test_a_page_that_is_a_bomb_is_not_unfolded(tmp_path: Path, kind: str) -> None:
    """Of 64 MB of zeros, beneath the footer of a file with little."""
    value, little, much = ("\0" * 1000, 1000, 64_000) if kind == "text" else (0, 1000, 8_000_000)
    writing = {
        "use_dictionary": False,
        "compression": "zstd",
        "data_page_size": 1 << 30,
        "row_group_size": 1 << 30,
    }
    bomb = written(tmp_path / "x", pa.table({"x": [value] * much}), **writing)
    small = written(tmp_path / "x", pa.table({"x": [value] * little}), **writing)
    footer = int.from_bytes(small[-8:-4], "little") + 8
    write_files(tmp_path / "d", {"a.parquet": bomb + small[-footer:]})
    said, most = most_memory(tmp_path / "d")
    assert "column 'x' has pages that unfold to more than its footer says" in said
    assert most < 8 << 20


def test_a_list_of_more_values_than_the_footer_says_is_not_unfolded(tmp_path: Path) -> None:
    """80 MB of a value that a page repeats, beneath a footer that tells of 9,999,999 values less."""
    count = 10_000_000
    numbers = pa.ListArray.from_arrays(pa.array([0, count], pa.int32()), pa.array(np.zeros(count, np.int64)))
    told = written(
        tmp_path / "x", pa.table({"x": numbers}), row_group_size=1, data_page_size=1 << 30, compression="zstd"
    )
    footer = len(told) - int.from_bytes(told[-8:-4], "little") - 8
    many = bytes([0x80, 0xDA, 0xC4, 0x09])  # a varint, zigzag
    little = bytes([0x82, 0x80, 0x80, 0x00])
    end = told[footer:]
    assert many in end
    write_files(tmp_path / "d", {"a.parquet": told[:footer] + end.replace(many, little, 1)})
    said, most = most_memory(tmp_path / "d")
    assert "column 'x' has pages that unfold to more than its footer says" in said
    assert most < 8 << 20


@pytest.mark.parametrize("told", [True, False])
def test_prefixes_of_bytes_of_one_size_are_refused(tmp_path: Path, told: bool) -> None:
    """pyarrow looks at the sizes of what they make once it is made."""
    data = written(
        tmp_path / "x",
        pa.table({"x": pa.array([b"12345"] * 300, pa.binary(5))}),
        use_dictionary=False,
        column_encoding={"x": "DELTA_BYTE_ARRAY"},
        store_schema=False,
        write_statistics=False,
    )
    last = bytes([2 * 3, 2 * 7])  # RLE and it, as zigzag numbers
    assert data.count(last) == 1
    write_files(tmp_path / "d", {"a.parquet": data if told else data.replace(last, bytes([6, 0]))})
    with pytest.raises(
        InvalidInput if told else CorruptData, match=r"encoded as DELTA_BYTE_ARRAY|in an encoding"
    ):
        open_dataset(tmp_path / "d")[0]


@pytest.mark.parametrize("hidden", ["dictionary", "prefixes"])
def test_a_repetition_that_the_footer_hides_is_not_unfolded(tmp_path: Path, hidden: str) -> None:
    """A value of 1 MB 20,000 times, by a dictionary or as the prefix of the next one, beneath a footer that says PLAIN."""
    value, count = "x" * 1_000_000, 20_000
    writing: dict[str, Any] = {"store_schema": False, "row_group_size": 1 << 30, "write_statistics": False}
    if hidden == "dictionary":
        column = pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), pa.array([value]))
    else:
        column = pa.array([value] * 300)
        writing |= {"use_dictionary": False, "column_encoding": {"x": "DELTA_BYTE_ARRAY"}}
    told = written(tmp_path / "x", pa.table({"x": column}), **writing)
    footer = len(told) - int.from_bytes(told[-8:-4], "little") - 8
    body, end = told[:footer], told[footer:]
    last = bytes(
        {"dictionary": [2 * 3, 2 * 8], "prefixes": [2 * 3, 2 * 7]}[hidden]
    )  # RLE and it, as zigzag numbers
    assert last in end
    write_files(tmp_path / "d", {"a.parquet": body + end.replace(last, bytes([6, 0]))})
    said, most = most_memory(tmp_path / "d")
    assert "in an encoding that its footer does not tell" in said
    assert most < 8 << 20


def most_memory(folder: Path) -> tuple[str, int]:
    """What a process of its own prints that reads a sample, and the most that pyarrow held meanwhile."""
    script = (
        "import pyarrow, sys; from loader import open_dataset\n"
        "try: open_dataset(sys.argv[1])[0]\n"
        "except Exception as error: print(error)\n"
        "print('most', pyarrow.default_memory_pool().max_memory())"
    )
    found = subprocess.run([sys.executable, "-c", script, str(folder)], capture_output=True, text=True)
    return found.stdout, int(found.stdout.split()[-1])


@pytest.mark.parametrize("twice", ["header", "field", "wrapped"])
def test_a_page_that_has_two_readings_is_not_unfolded(tmp_path: Path, twice: str) -> None:
    """One for whoever checks, another for pyarrow: a value of 1 MB 64 times, as the prefix of the next one."""
    told = written(
        tmp_path / "x",
        pa.table({"x": ["x" * 1_000_000] * 64}),
        store_schema=False,
        write_statistics=False,
        use_dictionary=False,
        column_encoding={"x": "DELTA_BYTE_ARRAY"},
        data_page_version="2.0",
        row_group_size=1 << 30,
    )
    begin, footer = 4, len(told) - int.from_bytes(told[-8:-4], "little") - 8
    _, taken = read_struct(told[begin:footer], {})
    header, end = told[begin : begin + taken], told[footer:]
    if twice == "header":  # one of the first version, with PLAIN, before that of the second
        first = bytes([0x15, 2, 0x15, 0, 0x15, 6, 0x15, 6, 0])
        forged = header.replace(b"\x5c", b"\x2c" + first + b"\x3c", 1)
    elif twice == "wrapped":  # pyarrow takes the lower 32 bits of the encoding
        forged = header.replace(bytes([0x15, 2 * 7]), b"\x15" + varint(2 * 7 + (1 << 32)))
    else:  # an encoding of a type that pyarrow skips, behind the right one
        at = header.index(bytes([0x15, 2 * 7]), 6) + 2
        forged = header[:at] + bytes([0x06, 8, 0]) + header[at:]
    packed = pq.read_metadata(pa.BufferReader(told)).row_group(0).column(0).total_compressed_size
    old, new = varint(2 * packed), varint(2 * (packed + len(forged) - taken))
    assert len(old) == len(new)
    assert old in end
    end = end.replace(bytes([2 * 3, 2 * 7]), bytes([6, 0])).replace(old, new)
    body = told[:begin] + forged + told[begin + taken : footer]
    write_files(tmp_path / "d", {"a.parquet": body + end})
    printed, most = most_memory(tmp_path / "d")
    assert "a.parquet cannot be read as Parquet" in printed
    assert most < 8 << 20


def varint(number: int) -> bytes:
    """As Thrift writes it."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    return bytes([*out, number])


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
def test_lengths_of_text_stand_behind_levels_of_any_kind(
    tmp_path: Path, version: str, compression: str
) -> None:
    texts: list[str | None] = ["", "a" * 300, None, "bc"] * 40
    table = pa.table(
        {
            "some": texts,
            "none": pa.array([None] * 160, pa.string()),
            "all": pa.array(["x" * (n % 7) for n in range(160)]),
            "in": [{"text": each} for each in texts],
        },
        schema=pa.schema(
            [
                ("some", pa.string()),
                ("none", pa.string()),
                pa.field("all", pa.string(), nullable=False),
                ("in", pa.struct([("text", pa.string())])),
            ]
        ),
    )
    names = ("some", "none", "all", "in.text")
    body = written(
        tmp_path / "x",
        table,
        compression=compression,
        use_dictionary=False,
        column_encoding=dict.fromkeys(names, "DELTA_LENGTH_BYTE_ARRAY"),
        data_page_version=version,
        data_page_size=512,
    )
    write_files(tmp_path / "d", {"a.parquet": body})
    flat = table.flatten().to_pylist()
    same(
        list(open_dataset(tmp_path / "d")), [{k: v for k, v in row.items() if v is not None} for row in flat]
    )


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("nullable", [False, True])
def test_a_page_of_more_lengths_than_values_is_not_unfolded(
    tmp_path: Path, version: str, nullable: bool
) -> None:
    """200 empty texts, in a page that says it has the lengths of 500,000,000: 2 GB."""
    schema = pa.schema([pa.field("x", pa.string(), nullable=nullable)])
    told = written(
        tmp_path / "x",
        pa.table({"x": [""] * 200}, schema=schema),
        compression="none",
        use_dictionary=False,
        column_encoding={"x": "DELTA_LENGTH_BYTE_ARRAY"},
        data_page_version=version,
    )
    begun = varint(128) + varint(4) + varint(200)  # values in a block, its parts, lengths
    forged = varint(128) + varint(1) + varint(500_000_000) + bytes(3)
    at = told.index(begun)
    write_files(tmp_path / "d", {"a.parquet": told[:at] + forged + told[at + len(forged) :]})
    said, most = most_memory(tmp_path / "d")
    assert "column 'x' has a page of more lengths than values" in said
    assert most < 8 << 20
