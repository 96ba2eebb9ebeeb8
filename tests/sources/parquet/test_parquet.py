"""Parquet: rows are read back as pyarrow reads them, opening reads footers alone, and damage is a typed error."""

from __future__ import annotations

import itertools
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.__main__ import run
from cachesvc.catalog.build import DirectBytes
from cachesvc.catalog.compiler import Inputs, ListedObject
from cachesvc.catalog.formats.parquet import compile_parquet
from cachesvc.catalog.options import Options
from cachesvc.core.errors import CorruptData, InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.parquet.parquet import FOOTER_BYTES, Footer
from loader import DataLoader, open_dataset
from testbed.node import Daemon
from tests.support.catalog_reader import Folder, compiled
from tests.support.datasets import write_files

ROWS = 800
SECOND = 277
"""Rows of the first and of the second file."""


@pytest.fixture(autouse=True)
def _no_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHESVC", "off")


def everything(rows: int = ROWS) -> pa.Table:
    """Make a table with a column of each kind, with nulls."""
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
    """Return the sample expected for each row."""
    found: list[dict[str, Any]] = table.to_pylist()
    return found


def same(samples: Sequence[dict[str, Any]], rows: Sequence[dict[str, Any]]) -> None:
    """Assert that samples equal rows and have the same types."""
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
        {
            "dictionary_pagesize_limit": 64,
            "data_page_size": 512,
        },  # the writer falls back from dictionaries half-way
    ],
    ids=lambda writing: ",".join(writing) or "default",
)
def test_rows_come_back_as_they_were_written(tmp_path: Path, writing: dict[str, Any]) -> None:
    table = everything()
    for name, part in (("a", table), ("b", table.slice(100, SECOND))):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=150, **writing)
    dataset = open_dataset(tmp_path, extent_bytes=1 << 16)
    assert not dataset.catalog.notes
    rows = rows_of(table) + rows_of(table.slice(100, SECOND))
    same([dataset[n] for n in range(len(dataset))], rows)
    assert dataset.catalog.extent_sizes.max() <= 1 << 16
    assert len(dataset.catalog.extent_sizes) > 2
    keys = {dataset.catalog.key(n) for n in range(len(dataset))}
    assert keys == {f"a.parquet:{n}" for n in range(ROWS)} | {f"b.parquet:{n}" for n in range(SECOND)}


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
    same(list(dataset), rows)


def test_a_dictionary_value_is_stored_once(tmp_path: Path) -> None:
    """20 GB of text in a file of 2 MB takes 2 MB in the cache, too."""
    big = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * 1_000_000]))
    pq.write_table(pa.table({"big": big, "n": range(20_000)}), tmp_path / "a.parquet")
    dataset = open_dataset(tmp_path)
    assert dataset.catalog.extent_sizes.sum() < 4 << 20
    assert dataset[19_999] == {"big": "x" * 1_000_000, "n": 19_999}


@pytest.mark.parametrize("dictionary", [True, False])
def test_fixed_size_bytes_are_counted_for_each_row(tmp_path: Path, dictionary: bool) -> None:
    """pyarrow always expands a dictionary of them; the footer states the size of that."""
    column = pa.array([b"x" * 1_000_000 if n % 2 else None for n in range(50)], pa.binary(1_000_000))
    pq.write_table(
        pa.table({"big": column}), tmp_path / "a.parquet", write_statistics=False, use_dictionary=dictionary
    )
    assert (tmp_path / "a.parquet").stat().st_size < 2 << 20
    dataset = open_dataset(tmp_path)
    assert 50_000_000 < dataset.catalog.extent_sizes.sum() < 50_000_100
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
    assert catalog.stored_bytes == sizes - footers - 3 * len(b"PAR1")


def test_a_footer_larger_than_the_first_read(tmp_path: Path) -> None:
    table = pa.table({f"column {n}": range(200) for n in range(60)})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=5)
    assert pq.read_metadata(tmp_path / "a.parquet").serialized_size > 64 << 10
    dataset = open_dataset(tmp_path)
    assert dataset[199] == {f"column {n}": 199 for n in range(60)}


@pytest.mark.slow
def test_row_groups_are_not_joined_beyond_32_bit_offsets(tmp_path: Path) -> None:
    """Eight row groups of 600 MB each, and extents of up to 8 GiB."""
    wide = pa.DictionaryArray.from_arrays(
        pa.array([0] * 6, pa.int32()), pa.array([bytes(100_000_000)], pa.binary(100_000_000))
    )
    with pq.ParquetWriter(
        tmp_path / "a.parquet", pa.schema([("x", wide.type)]), compression="zstd"
    ) as writer:
        for _ in range(8):
            writer.write_table(pa.table({"x": wide}))
    catalog = compiled(tmp_path, Options(extent_bytes=8 << 30))
    assert np.diff(catalog.extent_first).tolist() == [42, 6]


def test_few_footers_are_in_memory_at_a_time(tmp_path: Path) -> None:
    """Reading row groups is slower than the source: the footers of 10,000 files would take gigabytes."""
    body = written(tmp_path / "x", pa.table({"x": range(3)}))
    entries = [
        ListedObject(ObjectVersion(f"s3://b/{n}.parquet", len(body), ""), f"{n}.parquet") for n in range(200)
    ]
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
    assert open_dataset(tmp_path, fields=("five",), decode=None)[7] == (b"00007",)


def test_rows_through_a_daemon_and_s3(
    tmp_path: Path, s3_server: Any, s3_env: dict[str, str], bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = everything()
    for name, part in (("a", table), ("b", table.slice(100, SECOND))):
        pq.write_table(part, tmp_path / f"{name}.parquet", row_group_size=150)
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
            rows_of(table) + rows_of(table.slice(100, SECOND)), key=lambda row: (row["five"], repr(row))
        )
        assert [sample["five"] for sample in found] == [row["five"] for row in expected]
        same(
            [dataset[n] for n in range(0, len(dataset), 50)],
            (rows_of(table) + rows_of(table.slice(100, SECOND)))[::50],
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


def test_a_footer_above_the_limit_is_not_read() -> None:
    """A catalog stored beside the data may state a footer as long as the file."""
    long = FOOTER_BYTES + 1
    with pytest.raises(CorruptData, match="footer of 33,554,433 bytes"):
        Footer("s3://b/x.parquet", long.to_bytes(4, "little") + b"PAR1")


def test_a_damaged_or_unsupported_file_is_a_typed_error(tmp_path: Path) -> None:
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
        written(tmp_path / "x", pa.table({"x": pa.array([[]], pa.list_(pa.int32(), 0))})): InvalidInput,
        written(tmp_path / "x", pa.Table.from_arrays([pa.array([1])] * 2, ["x", "x"])): InvalidInput,
    }
    for number, (data, error) in enumerate(damaged.items()):
        write_files(tmp_path / f"d{number}", {"a.parquet": data})
        with pytest.raises(
            error, match=r"a\.parquet|holds no whole sample|has no column of a type that is read: column x"
        ):
            compiled(tmp_path / f"d{number}")


def test_a_column_may_have_the_name_of_another_ones_part(tmp_path: Path) -> None:
    columns = [pa.array(["a", "b"]), pa.array([3, 4]), pa.array([3, 4]), pa.array([{"y": "c"}, {"y": "d"}])]
    pq.write_table(pa.Table.from_arrays(columns, ["a", "two", "x.y", "x"]), tmp_path / "a.parquet")
    same(
        list(open_dataset(tmp_path)),
        [{"a": "a", "two": 3, "x.y": 3, "x": {"y": "c"}}, {"a": "b", "two": 4, "x.y": 4, "x": {"y": "d"}}],
    )
    assert open_dataset(tmp_path, fields=("x.y", "a"))[0] == (3, "a")


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
def test_a_list_with_nulls_is_a_python_list_and_one_without_is_an_array(
    tmp_path: Path, kind: pa.DataType
) -> None:
    one = (True, False) if kind.value_type == pa.bool_() else (1, 0)
    rows = [[one[0], None, one[1]], [one[0], one[1], one[0]], None, [None] * 3]
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", pa.table({"x": pa.array(rows, kind)}))})
    found = list(open_dataset(tmp_path / "d", fields=("x",)))
    assert (found[0], found[2], found[3]) == (([1, None, 0],), (None,), ([None] * 3,))
    assert isinstance(found[1][0], np.ndarray)
    assert found[1][0].tolist() == [1, 0, 1]


def test_columns_of_unsupported_types_are_left_out_with_a_note(tmp_path: Path) -> None:
    columns = {"empty": pa.array([[], None], pa.list_(pa.int32(), 0)), "number": pa.array([1, 2])}
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", pa.table(columns))})
    dataset = open_dataset(tmp_path / "d")
    assert list(dataset) == [1, 2]
    assert [note.split()[1] for note in dataset.catalog.notes] == ["empty"]


def tensors(shape: tuple[int, ...], permutation: list[int] | None = None) -> pa.ExtensionArray:
    count = int(np.prod(shape))
    rows = [list(range(count)), None, [float(n) for n in range(count, 2 * count)]]
    kind = pa.fixed_shape_tensor(pa.float32(), shape, permutation=permutation)
    return pa.ExtensionArray.from_storage(kind, pa.array(rows, pa.list_(pa.float32(), count)))


@pytest.mark.parametrize(
    ("shape", "permutation"),
    [((6,), None), ((2, 3), None), ((2, 3, 4), None), ((2, 3), [1, 0]), ((2, 3, 4), [2, 0, 1]), ((), None)],
)
def test_fixed_shape_tensors_are_arrays_of_that_shape(
    tmp_path: Path, shape: tuple[int, ...], permutation: list[int] | None
) -> None:
    """`permutation` as in Arrow's specification: the logical order of the stored dimensions."""
    inside = pa.StructArray.from_arrays([tensors(shape, permutation)], ["t"])
    table = pa.table({"x": tensors(shape, permutation), "in": inside})
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", table)})
    rows = list(open_dataset(tmp_path / "d"))
    assert rows[1] == {"x": None, "in": {"t": None}}
    for row, first in ((0, 0), (2, int(np.prod(shape)))):
        right = np.arange(first, first + int(np.prod(shape)), dtype="f4").reshape(shape)
        right = right if permutation is None else right.transpose(permutation)
        for found in (rows[row]["x"], rows[row]["in"]["t"]):
            assert (found.dtype, found.shape) == (np.float32, right.shape)
            assert np.array_equal(found, right)


def test_tensors_are_stacked_and_one_with_nulls_is_nested_lists(tmp_path: Path) -> None:
    whole = tensors((2, 3)).take(pa.array([0, 2, 0]))
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", pa.table({"x": whole}))})
    (batch,) = DataLoader(open_dataset(tmp_path / "d"), batch_size=3)
    assert batch.shape == (3, 2, 3)
    storage = pa.array([[1, None, 3, 4]], pa.list_(pa.int32(), 4))
    holed = pa.ExtensionArray.from_storage(pa.fixed_shape_tensor(pa.int32(), (2, 2)), storage)
    write_files(tmp_path / "e", {"a.parquet": written(tmp_path / "x", pa.table({"x": holed}))})
    assert open_dataset(tmp_path / "e")[0] == [[1, None], [3, 4]]


def test_types_that_do_not_unite_and_mixed_formats_are_refused(tmp_path: Path) -> None:
    one = written(tmp_path / "x", pa.table({"x": ["a"], "y": [1]}))
    other = written(tmp_path / "x", pa.table({"x": ["a"], "y": ["1"]}))
    write_files(tmp_path / "d", {"a.parquet": one, "b.parquet": other})
    with pytest.raises(
        InvalidInput, match=r"b\.parquet: column 'y' is string, and int64 in the files before it"
    ):
        compiled(tmp_path / "d")
    assert list(open_dataset(tmp_path / "d", fields=("x",))) == [("a",), ("a",)]
    write_files(tmp_path / "g", {"a.parquet": one, "b.tar": b""})
    with pytest.raises(InvalidInput, match=r"format= \(parquet, webdataset\)"):
        compiled(tmp_path / "g")


def test_without_pyarrow_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(tmp_path / "d", {"a.parquet": written(tmp_path / "x", pa.table({"x": ["a"]}))})
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InvalidInput, match=r"pip install '\.\[parquet\]'"):
        compiled(tmp_path / "d")


def test_texts_stored_by_their_prefixes_are_measured(tmp_path: Path) -> None:
    """DELTA_BYTE_ARRAY stores what a value has in common with the one before as a number: the footer bounds nothing."""
    rows = [
        {"x": f"a long prefix {n}", "y": [f"{n % 7}" * 20] * (n % 3), "z": b"%05d" % n} for n in range(300)
    ]
    kinds = pa.schema([("x", pa.string()), ("y", pa.list_(pa.string())), ("z", pa.binary(5))])
    data = written(
        tmp_path / "x",
        pa.Table.from_pylist(rows, kinds),
        use_dictionary=False,
        column_encoding=dict.fromkeys(("x", "y.list.element", "z"), "DELTA_BYTE_ARRAY"),
        row_group_size=100,
    )
    write_files(tmp_path / "d", {"a.parquet": data})
    same(list(open_dataset(tmp_path / "d")), rows)
    same(list(open_dataset(tmp_path / "d", extent_bytes=4096)), rows)


def test_a_page_that_decodes_to_more_than_its_footer_states_is_corrupt(tmp_path: Path) -> None:
    """The file has the footer of a file with little text and the pages of one with much."""
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


@pytest.mark.parametrize("version", ["1.0", "2.0"])
@pytest.mark.parametrize("compression", ["none", "snappy", "gzip", "brotli", "zstd", "lz4"])
def test_delta_length_texts_are_read_with_levels_of_any_kind(
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
    same(list(open_dataset(tmp_path / "d")), table.to_pylist())
