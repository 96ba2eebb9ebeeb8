"""The catalog's file is complete or refused, has the same bytes each time, and is searched as Python would."""

from __future__ import annotations

import json
import operator
import os
import random
import struct
import subprocess
import tracemalloc
from pathlib import Path

import lmdb
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.column_file import mapped_columns, write_columns
from cachesvc.catalog.columns import MappedTexts, TextColumn
from cachesvc.catalog.listing import BESIDE
from cachesvc.catalog.options import Options
from cachesvc.catalog.search import NumberValues, TextValues, select
from cachesvc.catalog.survey import survey
from cachesvc.catalog.validation import check_catalog
from cachesvc.core.errors import CorruptData, InvalidInput, OutOfSpace
from tests.support.catalog_reader import Folder, compiled, samples_of
from tests.support.datasets import image_folder, labelled_table, mds_shards, tar_shards, write_files


def _built(tmp_path: Path) -> bytes:
    image_folder(tmp_path / "d", ["a", "b"], 40, 200)
    compiled(tmp_path / "d", Options(extent_bytes=4096))
    return next(tmp_path.glob(".*.catalog")).read_bytes()


def test_a_file_that_cannot_be_written_says_why_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(OutOfSpace, match=r"No such file.*make the folder .*gone again") as gone:
        write_columns(str(tmp_path / "gone/c.lmdb"), {}, {})
    assert "free space" not in str(gone.value)
    (tmp_path / "taken").mkdir()
    with pytest.raises(OutOfSpace, match="cannot be written"):
        write_columns(str(tmp_path / "taken"), {}, {})
    assert os.listdir(tmp_path) == ["taken"]


def test_a_read_only_disk_is_not_called_full(tmp_path: Path) -> None:
    mounted = tmp_path / "disk"
    mounted.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro,size=1m", "none", mounted], capture_output=True)
    if done.returncode:
        pytest.skip("NOT TESTED: mounting needs root")
    try:
        with pytest.raises(OutOfSpace, match=r"Read-only file system.*make .*disk writable again"):
            write_columns(str(mounted / "c.lmdb"), {}, {})
    finally:
        subprocess.run(["umount", mounted], check=True)


def test_written_columns_are_read_back_by_us_and_by_lmdb(tmp_path: Path) -> None:
    path = str(tmp_path / "f")
    columns = {f"c{i}": np.arange(i * 997, dtype=dtype) for i in range(12) for dtype in ("<i8",)}
    columns |= TextColumn(["", "ä", "\udcff", "x" * 5000]).columns("words")
    write_columns(path, {"hello": 1}, columns)
    with mapped_columns(path) as found:
        pass
    assert found.head["hello"] == 1
    assert all(np.array_equal(found[name], column) for name, column in columns.items())
    assert list(MappedTexts(found, "words")) == ["", "ä", "\udcff", "x" * 5000]
    with lmdb.open(path, subdir=False, lock=False, readonly=True) as env, env.begin() as transaction:
        assert transaction.get(b"c11/000000") == columns["c11"].tobytes()
        assert env.stat()["entries"] == len(found.places)
        for key, (begin, length) in found.places.items():
            assert transaction.get(key.encode()) == bytes(found.data[begin : begin + length])


def test_a_column_of_several_values_is_joined(tmp_path: Path) -> None:
    columns = {"long": np.arange(5000), "short": np.arange(5, dtype="<i4")}
    write_columns(str(tmp_path / "f"), {}, columns, value_bytes=1 << 12)
    with mapped_columns(str(tmp_path / "f")) as found:
        assert len(found.places) == 12
        assert all(np.array_equal(found[name], column) for name, column in columns.items())


def test_the_same_dataset_gives_the_same_file(tmp_path: Path) -> None:
    first = _built(tmp_path)
    compiled(tmp_path / "d", Options(extent_bytes=4096))
    assert next(tmp_path.glob(".*.catalog")).read_bytes() == first


def test_a_catalog_opens_through_a_descriptor_twice_and_after_a_fork(tmp_path: Path) -> None:
    (tmp_path / "c").write_bytes(_built(tmp_path))
    descriptor = os.open(tmp_path / "c", os.O_RDONLY)
    catalogs = [Catalog.open(f"/proc/self/fd/{descriptor}") for _ in range(2)]
    os.close(descriptor)
    labels = catalogs[0].labels
    child = os.fork()
    if child == 0:
        os._exit(int(catalogs[1].key(3) != catalogs[0].key(3)))
    assert os.waitpid(child, 0)[1] == 0
    del catalogs
    assert labels is not None
    assert labels.sum() == 40


def test_damaged_catalogs_are_refused_without_a_crash(tmp_path: Path) -> None:
    whole, path, draw = _built(tmp_path), tmp_path / "broken", random.Random(0)
    for cut in [0, 1, 31, 32, 33, 4096, *(draw.randrange(len(whole)) for _ in range(30))]:
        path.write_bytes(whole[:cut])
        with pytest.raises(CorruptData):
            Catalog.open(str(path))
    path.write_bytes(draw.randbytes(50_000))
    with pytest.raises(CorruptData):
        Catalog.open(str(path))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_a_forged_catalog_is_refused_or_reads_within_itself(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    folder = tmp_path_factory.getbasetemp() / "forged"
    if not folder.exists():
        folder.mkdir()
        (folder / "whole").write_bytes(_built(folder))
    raw = bytearray((folder / "whole").read_bytes())
    for _ in range(data.draw(st.integers(1, 8))):
        raw[data.draw(st.integers(0, len(raw) - 41))] = data.draw(st.integers(0, 255))
    (folder / "broken").write_bytes(raw)
    try:
        catalog = Catalog.open(str(folder / "broken"))
        check_catalog(catalog)
    except CorruptData:
        return
    assert catalog.space_bytes >= 0


def test_a_catalog_beside_the_data_is_used_and_a_stale_one_is_not(tmp_path: Path) -> None:
    tar_shards(tmp_path / "d", 1, 10, 300)
    catalog = compiled(tmp_path / "d")
    (tmp_path / "d" / BESIDE).write_bytes(next(tmp_path.glob(".*.catalog")).read_bytes())
    folder = Folder()
    adopted = compiled(tmp_path / "d", folder=folder)
    assert adopted.id == catalog.id
    assert {Path(uri).name for uri in folder.reads} == {BESIDE}
    assert samples_of(adopted) == samples_of(catalog)
    tar_shards(tmp_path / "d", 1, 11, 300)
    assert compiled(tmp_path / "d").samples == 11


def test_a_catalog_beside_the_data_that_is_too_large_is_not_fetched(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Any user with write access beside the data chooses the size: a sparse file costs nothing."""
    tar_shards(tmp_path / "d", 1, 10, 300)
    with (tmp_path / "d" / BESIDE).open("wb") as file:
        file.truncate((64 << 20) + 1)
    folder = Folder()
    assert compiled(tmp_path / "d", folder=folder).samples == 10
    assert BESIDE not in {Path(uri).name for uri in folder.reads}
    assert "67,108,864 at most" in caplog.text


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    tar_shards(tmp_path / "d", 1, 10, 300)
    shard = tmp_path / "d" / "000000.tar"
    shard.write_bytes(shard.read_bytes()[:3000])
    source = Folder()
    found = survey([str(tmp_path / "d")], Options(), lambda uri: source)
    with pytest.raises(CorruptData):
        build(
            found, str(tmp_path / "c"), lambda uri: source, DirectBytes(lambda uri: source), lambda *_: None
        )
    assert {path.name for path in tmp_path.iterdir()} == {"d"}


_OPS = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_ROWS = st.lists(
    st.tuples(st.sampled_from([None, "cat", "dog", "ox"]), st.sampled_from([None, -1.5, 0.0, 2.0])),
    min_size=1,
    max_size=8,
)
_LEAF = st.one_of(
    st.tuples(st.just("word"), st.sampled_from(list(_OPS)), st.sampled_from(["cat", "dog", "emu"])),
    st.tuples(st.just("size"), st.sampled_from(list(_OPS)), st.sampled_from([-1.5, 0, 1, 2])),
)
_TREE = st.recursive(
    _LEAF,
    lambda inner: st.one_of(
        st.tuples(st.just("not"), inner), st.tuples(st.sampled_from(["and", "or"]), inner, inner)
    ),
    max_leaves=6,
)


def _text(tree) -> str:  # type: ignore[no-untyped-def]
    if tree[0] == "not":
        return f"(not {_text(tree[1])})"
    if tree[0] in ("and", "or"):
        return f"({_text(tree[1])} {tree[0]} {_text(tree[2])})"
    return f"{tree[0]} {tree[1]} {tree[2]!r}"


def _truth(tree, row) -> bool:  # type: ignore[no-untyped-def]
    if tree[0] == "not":
        return not _truth(tree[1], row)
    if tree[0] in ("and", "or"):
        sides = _truth(tree[1], row), _truth(tree[2], row)
        return all(sides) if tree[0] == "and" else any(sides)
    value = row[tree[0] == "size"]
    return value is not None and _OPS[tree[1]](value, tree[2])


@settings(max_examples=150, deadline=None)
@given(_ROWS, _TREE)
def test_search_agrees_with_python(rows, tree) -> None:  # type: ignore[no-untyped-def]
    words = ["cat", "dog", "ox"]
    columns: dict[str, NumberValues | TextValues] = {
        "word": TextValues(
            np.asarray([-1 if word is None else words.index(word) for word, _ in rows]), words
        ),
        "size": NumberValues(np.asarray([np.nan if size is None else size for _, size in rows])),
    }
    found = select(_text(tree), len(rows), columns.__getitem__, list(columns))
    assert found.tolist() == [_truth(tree, row) for row in rows]


@pytest.mark.parametrize(
    "expression",
    ["", "colour == 1", "__import__('os')", "key.upper() == 'A'", "key == key", "(", "label < 'a' + 'b'",
     "[1]", "lambda: 1", "key.startswith(key)", "label == 10**9999", "not " * 300 + "True"],
)  # fmt: skip
def test_an_invalid_search_is_a_typed_error(tmp_path: Path, expression: str) -> None:
    image_folder(tmp_path / "d", ["a", "b"], 2, 50)
    with pytest.raises(InvalidInput):
        compiled(tmp_path / "d").find(expression)


@pytest.mark.parametrize("word", ["or", "and"])
def test_memory_of_a_search_does_not_grow_with_its_parts(word: str) -> None:
    samples, column = 10_000, NumberValues(np.arange(10_000, dtype=np.float64))
    expression = f" {word} ".join(f"x == {number}" for number in range(1000))
    tracemalloc.start()
    try:
        found = select(expression, samples, lambda _: column, ["x"])
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found.sum() == (1000 if word == "or" else 0)
    assert peak_bytes < 5_000_000


def _forged(tmp_path: Path, changed: dict[str, np.ndarray]) -> Catalog:
    """Return a valid catalog with some columns replaced, as a user with write access beside the data may write it."""
    (path,) = tmp_path.glob(".*.catalog")
    with mapped_columns(str(path)) as found:
        pass
    columns = {name: found[name] for name in found.head["columns"]} | changed
    write_columns(str(tmp_path / "forged"), {k: v for k, v in found.head.items() if k != "columns"}, columns)
    return Catalog.open(str(tmp_path / "forged"))


def _is_refused(tmp_path: Path, *changes: dict[str, np.ndarray]) -> None:
    check_catalog(_forged(tmp_path, {}))
    for changed in changes:
        with pytest.raises(CorruptData):
            check_catalog(_forged(tmp_path, changed))


def _sealed(path: Path, head: bytes, index: bytes | None = None) -> str:
    """Write a catalog's file whose LMDB part is only a head, with this index."""
    index = json.dumps({"head": [0, len(head)]}).encode() if index is None else index
    path.write_bytes(head + index + struct.pack("<8sQQ16s", b"CSCATLG2", len(head), len(index), bytes(16)))
    return str(path)


@pytest.mark.parametrize(
    ("head", "index", "said"),
    [
        (b"[" + b"[]," * 3_000_000 + b"[]]", None, "a head of 9,000,004 bytes"),
        (b"[" * 100_000, None, "recursion"),
        (b"[]", None, "is no catalog"),
        (b"", b"{}" + b" " * 9_000_000, "an index of 9,000,002 bytes"),
        (b"", b"[" * 100_000, "recursion"),
        (b"", b"[]", "is no catalog"),
        (b"", b"{}", "head is missing"),
        (b"{}", b'{"head": [0, 3]}', "a value outside the file"),
        (b"{}", b'{"head": [-1, 2]}', "a value outside the file"),
        (b"{}", b'{"head": [0, Infinity]}', "is no catalog"),
    ],
    ids=[
        "long head", "deep head", "head is a list", "long index", "deep index", "index is a list", "no head",
        "value beyond the end", "value before the start", "value without end",
    ],
)  # fmt: skip
def test_a_file_that_no_builder_wrote_is_refused_with_little_memory(
    tmp_path: Path, head: bytes, index: bytes | None, said: str
) -> None:
    path = _sealed(tmp_path / "c", head, index)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptData, match=said):
            Catalog.open(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 << 20


@pytest.mark.slow
def test_a_catalog_of_many_classes_has_a_short_head(tmp_path: Path) -> None:
    rows = [{"file_name": f"{n}.bin", "label": f"class {n}"} for n in range(90_000)]
    write_files(tmp_path / "d", {f"{n}.bin": b"x" for n in (0, 7)})
    labelled_table(tmp_path / "d", "labels.csv", rows[:1] + [{**row, "file_name": "7.bin"} for row in rows])
    catalog = compiled(tmp_path / "d", Options(labels="labels.csv"))
    assert len(catalog.classes) == 90_000
    assert (catalog.classes[0], catalog.classes[-1]) == ("class 0", "class 9999")
    check_catalog(catalog)


def test_too_long_field_names_are_an_error_of_the_builder(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"names of fields and tags take 1,\d+,\d+ bytes"):
        write_columns(str(tmp_path / "c"), {"fields": ["x" * (1 << 20)]}, {})
    assert not list(tmp_path.iterdir())


def test_a_catalog_keeps_the_first_of_many_notes(tmp_path: Path) -> None:
    write_files(tmp_path / "d", {f"{n:03}.bin": bytes(15) for n in range(150)})
    catalog = compiled(tmp_path / "d", Options(format="records", record_bytes=10))
    assert len(catalog.notes) == 100
    assert catalog.notes[98].partition(":")[0].endswith("098.bin")
    assert catalog.notes[99] == "and 51 notes more like these"


def test_a_forged_catalog_whose_rows_lie_between_extents_is_refused(tmp_path: Path) -> None:
    image_folder(tmp_path / "d", ["a", "b"], 40, 200)
    rows = [{"file_name": f"a/{n:06d}.jpg", "size": n, "city": "x"} for n in range(9)]
    labelled_table(tmp_path / "d", "labels.csv", rows)
    catalog = compiled(tmp_path / "d", Options(extent_bytes=4096))
    assert catalog.extent_sizes[0] < catalog.extent_starts[1]
    count, (address, length) = (
        catalog.samples,
        (each[:, 0].copy() for each in catalog.locate(np.arange(catalog.samples))),
    )
    length[0] = catalog.extent_starts[1] - address[0]
    _is_refused(
        tmp_path,
        {"row.length": length},
        {"row.address": np.full(count, catalog.extent_sizes[0])},
        {"row.address": address.astype(np.float64)},
        {"label": np.zeros(count - 1, np.int32)},
        {"label": np.full(count, -2, np.int32)},
        {"key.end": np.zeros(count - 1, np.int64)},
        {"tag.0.code": np.full(count, 7, np.int32)},
        {"tag.1.number": np.zeros(count + 1)},
    )


def test_a_forged_catalog_of_records_and_shards_beyond_their_extents_is_refused(tmp_path: Path) -> None:
    write_files(tmp_path / "r/d", {"x.bin": bytes(300), "y.bin": bytes(300)})
    compiled(tmp_path / "r/d", Options(format="records", record_bytes=30))
    _is_refused(
        tmp_path / "r",
        {"run.slot": np.asarray([1, 2048])},
        {"run.slot": np.asarray([0, 2**62])},
        {"run.first": np.asarray([0, 5])},
        {"run.first": np.asarray([0])},
        {"run.object": np.asarray([0, 2])},
    )
    mds_shards(tmp_path / "m/d", {"x": "bytes"}, [{"x": b"1"}] * 9, 3)
    compiled(tmp_path / "m/d")
    _is_refused(tmp_path / "m", {"extent.first": np.asarray([0, 0, 0, 9])})


def test_a_catalog_beside_the_data_that_cannot_be_stored_is_built_anew(tmp_path: Path) -> None:
    tar_shards(tmp_path / "d", 1, 10, 300)
    compiled(tmp_path / "d")
    (tmp_path / "d" / BESIDE).write_bytes(next(tmp_path.glob(".*.catalog")).read_bytes())
    source = Folder()
    found = survey([str(tmp_path / "d")], Options(), lambda uri: source)
    gone = str(tmp_path / "gone/c.lmdb")
    with pytest.raises(OutOfSpace, match="gone"):
        build(found, gone, lambda uri: source, DirectBytes(lambda uri: source), lambda done, total: None)


FILES = 12


@pytest.mark.parametrize(
    ("options", "name", "body"),
    [
        (Options(format="files"), "{}.bin", b"x" * 400),
        (Options(format="records", record_bytes=8), "{}.bin", b"x" * 400),
        (Options(format="jsonl"), "{}.jsonl", b'{"a": 1}\n' * 40),
    ],
)
def test_objects_and_bytes_are_told_in_bytes(
    tmp_path: Path, options: Options, name: str, body: bytes
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    for number in range(FILES):
        (data / name.format(number)).write_bytes(body)
    source, told = Folder(), list[tuple[int, int]]()
    found = survey([str(data)], options, lambda uri: source)
    sources = DirectBytes(lambda uri: source)
    build(found, str(tmp_path / "catalog"), lambda uri: source, sources, lambda *each: told.append(each))
    assert told[-1] == (FILES * len(body), FILES * len(body))
    assert told == sorted(told)
