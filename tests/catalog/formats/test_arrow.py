"""Arrow IPC: files, streams and Feather; what is damaged or not read is a typed error that names the file."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pytest

from cachesvc.catalog.formats.arrow_ipc import read_ipc
from cachesvc.core.errors import CacheError, CorruptData, InvalidInput, NotFound
from loader import DataLoader, open_dataset
from tests.support.catalog_reader import Folder, compiled
from tests.support.datasets import write_files

pytestmark = pytest.mark.usefixtures("direct")


def stream(table: pa.Table, rows: int = 1000, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def file(table: pa.Table, rows: int = 1000, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as out:
        out.write_table(table, max_chunksize=rows)
    return sink.getvalue().to_pybytes()


def feathered(table: pa.Table, rows: int = 1000, compression: str = "lz4") -> bytes:
    sink = pa.BufferOutputStream()
    feather.write_feather(table, sink, compression=compression, chunksize=rows)
    return sink.getvalue().to_pybytes()


TABLE = pa.table(
    {
        "n": range(100),
        "text": [f"é{n}" for n in range(100)],
        "some": [n if n % 3 else None for n in range(100)],
    }
)
WRITERS: dict[str, Callable[..., bytes]] = {"stream": stream, "file": file, "feather": feathered}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_files_of_any_kind_are_found_by_their_names(tmp_path: Path, write: Callable[..., bytes]) -> None:
    for number, name in enumerate(("a.arrow", "b.FEATHER", "c.ipc")):
        write_files(tmp_path / f"{number}", {name: write(TABLE, 30), "README.md": b"r"})
        dataset = open_dataset(tmp_path / f"{number}", extent_bytes=4096)
        assert (dataset.catalog.format, list(dataset)) == ("arrow", TABLE.to_pylist())
        assert dataset.catalog.key(57) == f"{name}:57"


def test_opening_reads_metadata_alone_and_a_local_file_is_not_copied(tmp_path: Path) -> None:
    wide = pa.table({"x": [bytes(10_000)] * 1000})
    write_files(tmp_path / "d", {"a.arrow": file(wide, 100)})
    folder = Folder()
    catalog = compiled(tmp_path / "d", folder=folder)
    assert len(folder.reads) < 30
    assert [piece.codec for piece in catalog.extent(0).pieces] == [""]
    dataset = open_dataset(tmp_path / "d")
    assert dataset[999] == bytes(10_000)
    assert dataset.opened.origin_bytes()["direct"] == 0


def test_dictionaries_belong_to_their_batches(tmp_path: Path) -> None:
    """A stream may replace a dictionary; the values of nested ones are dictionaries, too."""
    kind = pa.dictionary(pa.int8(), pa.string())
    first = pa.DictionaryArray.from_arrays(pa.array([0, 1, None], pa.int8()), ["a", "b"])
    other = pa.DictionaryArray.from_arrays(pa.array([0, 0, 1], pa.int8()), ["c", None])
    lists = [pa.ListArray.from_arrays([0, 1, 1, 3], each) for each in (first, other)]
    batches = [
        pa.record_batch({"k": each, "in": inner}) for each, inner in zip((first, other), lists, strict=True)
    ]
    assert batches[0].schema.field("k").type == kind
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batches[0].schema) as out:
        for batch in batches:
            out.write_batch(batch)
    write_files(tmp_path / "d", {"a.arrow": sink.getvalue().to_pybytes()})
    dataset = open_dataset(tmp_path / "d", extent_bytes=4096)
    assert list(dataset) == [row for batch in batches for row in batch.to_pylist()]
    shuffled = DataLoader(dataset, 2, shuffle=True, collate_fn=list)
    assert sum(len(batch) for batch in shuffled) == 6
    inner = pa.ListArray.from_arrays([0, 1, 3], first)
    nested = pa.DictionaryArray.from_arrays(pa.array([1, 0, 1], pa.int8()), inner)
    write_files(tmp_path / "f", {"a.arrow": stream(pa.table({"x": nested, "k": first}))})
    assert list(open_dataset(tmp_path / "f")) == pa.table({"x": nested, "k": first}).to_pylist()
    numbers = pa.table({"x": pa.array([7, 7, 8, None]).dictionary_encode()})
    write_files(tmp_path / "e", {"a.arrow": file(numbers)})
    assert list(open_dataset(tmp_path / "e")) == [7, 7, 8, None]


def test_columns_of_several_files_are_matched_by_name(tmp_path: Path) -> None:
    one = pa.table({"a": pa.array([1, 2], pa.int32()), "b": ["x", None], "c": pa.nulls(2)})
    two = pa.table(
        {"b": pa.array(["z"], pa.large_string()), "extra": [1.5], "a": pa.array([2**40]), "c": [[1]]}
    )
    write_files(tmp_path / "d", {"0.arrow": stream(one), "1.arrow": file(two)})
    dataset = open_dataset(tmp_path / "d")
    assert list(dataset) == [
        {"a": 1, "b": "x", "c": None, "extra": None},
        {"a": 2, "b": None, "c": None, "extra": None},
        {"a": 2**40, "b": "z", "c": pytest.approx([1]), "extra": 1.5},
    ]
    assert next(iter(DataLoader(open_dataset(tmp_path / "d", fields=("a",)), 3)))[0].tolist() == [1, 2, 2**40]
    write_files(tmp_path / "e", {"0.arrow": stream(one), "1.arrow": file(pa.table({"a": [0.5]}))})
    with pytest.raises(InvalidInput, match=r"0\.arrow: column 'a' has another type"):
        open_dataset(tmp_path / "e")
    write_files(tmp_path / "f", {"0.arrow": stream(one), "1.arrow": file(pa.table({"a": ["x"]}))})
    with pytest.raises(
        InvalidInput, match=r"1\.arrow: column 'a' is string, and int32 in the files before it"
    ):
        open_dataset(tmp_path / "f")


def test_columns_that_are_not_read_are_left_out_with_a_note(tmp_path: Path) -> None:
    pieces = [pa.array([1]), pa.array(["a"])]
    months = pa.array([(1, 2, 3), None], pa.month_day_nano_interval())
    columns = {
        "union": pa.UnionArray.from_dense(pa.array([0, 1], pa.int8()), pa.array([0, 0], pa.int32()), pieces),
        "lists": pa.array([[1], [2, 3]], pa.list_view(pa.int64())),
        "runs": pa.RunEndEncodedArray.from_arrays(pa.array([2], pa.int32()), pa.array([5])),
        "months": months,
        "deep": pa.StructArray.from_arrays(
            [months, pa.array([["a"], []]), pa.array([{"k": True}] * 2)], ["x", "y", "z"]
        ),
        "map": pa.MapArray.from_arrays([0, 1, 2], pa.array(["a", "b"]), months),
        "kinds": pa.array([[7], []], pa.list_view(pa.int8())),
        "n": [7, 8],
    }
    for number, write in enumerate((stream, file)):
        write_files(tmp_path / f"{number}", {"a.arrow": write(pa.table(columns))})
        dataset = open_dataset(tmp_path / f"{number}")
        assert list(dataset) == [7, 8]
        assert {note.split()[1] for note in dataset.catalog.notes} == columns.keys() - {"n"}
    del columns["n"]
    write_files(tmp_path / "none", {"a.arrow": stream(pa.table(columns))})
    with pytest.raises(InvalidInput, match=r"/none has no column of a type that is read: column union"):
        open_dataset(tmp_path / "none")


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_views_are_texts_as_polars_writes_them(tmp_path: Path, write: Callable[..., bytes]) -> None:
    texts = [None if n % 5 == 0 else "é" * (n % 20) for n in range(100)]
    lists = [[text, "x" * 40] for text in texts]
    columns = {
        "text": pa.array(texts, pa.string_view()),
        "raw": pa.array([(text or "").encode() for text in texts], pa.binary_view()),
        "lists": pa.array(lists, pa.list_(pa.string_view())),
    }
    write_files(tmp_path / "d", {"a.arrow": write(pa.table(columns), 30)})
    dataset = open_dataset(tmp_path / "d")
    assert list(dataset) == pa.table(columns).to_pylist()
    (batch,) = DataLoader(open_dataset(tmp_path / "d", fields=("raw",)), 100)
    assert batch[0] == tuple((text or "").encode() for text in texts)


def test_files_of_polars_have_their_schema_in_the_footer_alone(tmp_path: Path) -> None:
    body = (Path(__file__).parent / "data/polars-2.arrow").read_bytes()
    write_files(tmp_path / "d", {"a.arrow": body, "b.feather": file(pa.table({"i": [3], "s": ["c"]}))})
    assert list(open_dataset(tmp_path / "d")) == [
        {"i": 1, "s": "a"},
        {"i": 2, "s": "a text of more than twelve bytes"},
        {"i": 3, "s": "c"},
    ]


@pytest.mark.parametrize("feathered_by", [file, feathered])
def test_the_schema_at_the_beginning_of_a_file_is_not_read(
    tmp_path: Path, feathered_by: Callable[..., bytes]
) -> None:
    body = feathered_by(TABLE, 30)
    length = struct.unpack_from("<I", body, 12)[0]
    write_files(tmp_path / "d", {"a.arrow": body[:8] + bytes(8 + length) + body[16 + length :]})
    assert list(open_dataset(tmp_path / "d")) == TABLE.to_pylist()


def saved(root: Path, name: str = "data-00000-of-00001.arrow") -> None:
    """Write files with the names that `save_to_disk` gives."""
    write_files(root, {name: stream(TABLE), "state.json": b"{}", "dataset_info.json": b"{}"})


def test_a_saved_dataset_of_hugging_face_leaves_out_caches(tmp_path: Path) -> None:
    saved(tmp_path / "d")
    write_files(tmp_path / "d", {"cache-0123456789abcdef.arrow": stream(TABLE)})
    assert len(open_dataset(tmp_path / "d")) == 100


def test_the_splits_of_hugging_face_are_not_mixed(tmp_path: Path) -> None:
    saved(tmp_path / "d/train")
    saved(tmp_path / "d/test")
    write_files(tmp_path / "d", {"dataset_dict.json": json.dumps({"splits": ["train", "test"]}).encode()})
    with pytest.raises(InvalidInput, match=r"dataset_dict\.json .* open one of them"):
        open_dataset(tmp_path / "d")
    assert len(open_dataset(tmp_path / "d/train")) == 100


GOOD = file(TABLE, 30)
PACKED = feathered(TABLE, 30)
BAD: dict[str, tuple[bytes, type[CacheError], str]] = {
    "empty": (b"", CorruptData, "is no Arrow file"),
    "cut": (GOOD[:-20], CorruptData, "it was cut"),
    "a stream that was cut": (stream(TABLE, 30)[:-700], CorruptData, "it was cut"),
    "without rows": (file(TABLE.slice(0, 0)), NotFound, "holds no whole sample"),
    "another format": (b"PAR1" + bytes(500) + b"PAR1", CorruptData, "is no Arrow file"),
    "text": (b"hello, this is a text\n" * 99, CorruptData, "is no Arrow file"),
    "feather 1": (b"FEA1" + bytes(100) + b"FEA1", InvalidInput, "Feather version 1"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_damaged_file_is_a_typed_error(tmp_path: Path, name: str) -> None:
    body, kind, words = BAD[name]
    write_files(tmp_path / "d", {"a.arrow": body})
    with pytest.raises(kind, match=rf"(a\.arrow|/d) .*{words}"):
        compiled(tmp_path / "d")


def test_delta_dictionaries_are_refused(tmp_path: Path) -> None:
    batches = [
        pa.record_batch({"k": pa.DictionaryArray.from_arrays([0], values)}) for values in (["a"], ["a", "b"])
    ]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, batches[0].schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    ) as out:
        for batch in batches:
            out.write_batch(batch)
    write_files(tmp_path / "d", {"a.arrow": sink.getvalue().to_pybytes()})
    with pytest.raises(InvalidInput, match=r"a\.arrow has delta dictionaries"):
        compiled(tmp_path / "d")


@pytest.mark.parametrize("claim", [10**11, 2**62, -2])
def test_a_buffer_that_claims_a_hundred_gigabytes_takes_no_memory(tmp_path: Path, claim: int) -> None:
    found = read_ipc("a", 0, len(PACKED), lambda at, length: PACKED[at : at + length])
    offset, _ = found.batches[0].buffers[1]
    body = PACKED[:offset] + struct.pack("<q", claim) + PACKED[offset + 8 :]
    write_files(tmp_path / "d", {"a.arrow": body})
    with pytest.raises(CorruptData, match=r"a\.arrow is no Arrow file: a buffer of .* bytes becomes"):
        compiled(tmp_path / "d")


def test_offsets_that_point_outside_are_found_when_they_are_read(tmp_path: Path) -> None:
    body = stream(pa.table({"x": ["abc", "de"], "y": [[1], [2, 3]]}))
    found = read_ipc("a", 0, len(body), lambda at, length: body[at : at + length])
    text, _ = found.batches[0].buffers[1]
    lists, _ = found.batches[0].buffers[4]
    for at, field in ((text, "x"), (lists, "y")):
        for number in (2**31 - 1, 10**6, -1):
            write_files(
                tmp_path / "d", {"a.arrow": body[: at + 4] + struct.pack("<i", number) + body[at + 8 :]}
            )
            dataset = open_dataset(tmp_path / "d", fields=field)
            with pytest.raises(CorruptData, match=r"a\.arrow.* point outside"):
                dataset[0]
            dataset.close()
    assert np.frombuffer(body, "<i4", 3, text).tolist() == [0, 3, 5]


@pytest.mark.parametrize("first", [2**62, 2**63 - 1, -1])
def test_offsets_of_64_bits_do_not_overflow(tmp_path: Path, first: int) -> None:
    kinds = {"x": pa.large_string(), "y": pa.large_list(pa.int64())}
    body = stream(pa.table({"x": pa.array(["abc"], kinds["x"]), "y": pa.array([[1]], kinds["y"])}))
    found = read_ipc("a", 0, len(body), lambda at, length: body[at : at + length])
    for at, field in ((found.batches[0].buffers[1, 0], "x"), (found.batches[0].buffers[4, 0], "y")):
        write_files(
            tmp_path / "d", {"a.arrow": body[:at] + struct.pack("<qq", first, 2**63 - 1) + body[at + 16 :]}
        )
        dataset = open_dataset(tmp_path / "d", fields=field)
        with pytest.raises(CorruptData, match=r"a\.arrow.* point outside"):
            dataset[0]
        dataset.close()
