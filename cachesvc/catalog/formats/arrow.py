"""Compiles Arrow IPC files and streams, Feather, and what Hugging Face's `save_to_disk` writes.

Rows stay as they lie: an extent is a run of record batches, and values are read out of their buffers. A local file is
therefore in memory once, in the page cache. Compressed buffers are decoded while they are filled. A sample is a row.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.compiler import Draft, Inputs, ListedObject, in_threads
from cachesvc.catalog.described_data import check_one_table, tables_about
from cachesvc.catalog.formats.arrow_buffers import ArrowFile, Placed, Walk
from cachesvc.catalog.formats.arrow_ipc import Batch, IpcFile, read_ipc
from cachesvc.catalog.formats.column_draft import ColumnDraft, readable
from cachesvc.catalog.kinds import ARROW
from cachesvc.catalog.labels.hive_partitions import Partitions
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.sources.columnar.arrow_types import column_of, features_of, plain_schema, united
from cachesvc.sources.columnar.column import Column
from cachesvc.sources.columnar.extent import MAX_BYTES
from cachesvc.sources.parquet.recipe import pyarrow_for

_INFOS = frozenset({"state.json", "dataset_info.json"})
"""Files that `save_to_disk` writes beside the data."""
_MOST_TIMES = {"lz4": 256, "zstd": 1 << 20}
"""How many times as long as stored a compressed buffer may become: LZ4 cannot do more."""


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the Arrow files by their names, without those that Hugging Face's `map` caches beside a dataset. Raises
    InvalidInput for several datasets that were saved as one."""
    splits = next((entry.object.uri for entry in entries if entry.name == "dataset_dict.json"), None)
    if splits is not None:
        raise InvalidInput(
            f"{splits} says that its folders are datasets of their own (splits): open one of them, or name it by split="
        )
    folders = {_folder(entry) for entry in entries if entry.name in _INFOS}
    return [
        entry
        for entry in entries
        if entry.extension in ARROW and not (entry.name.startswith("cache-") and _folder(entry) in folders)
    ]


def _folder(entry: ListedObject) -> str:
    return entry.object.uri.rpartition("/")[0]


def compile_arrow(inputs: Inputs) -> Draft:
    """Compile by the metadata of each record batch. Raises CorruptData naming the file, InvalidInput for features that are
    not read and for files that are not one table."""
    arrow = pyarrow_for(inputs.uri, "Arrow")
    files = _files(
        arrow, inputs, [(at, 0, entry.object.size_bytes) for at, entry in enumerate(inputs.entries)]
    )
    columns = {file.at: [name for name, _, _ in file.columns] for file in files}
    about, notes = tables_about(inputs, lambda wanted: columns)
    check_one_table(inputs, {at: names for at, names in columns.items() if at not in about})
    draft = _compiled(arrow, inputs, [file for file in files if file.at not in about])
    draft.notes += notes
    return draft


def compile_ipc(inputs: Inputs, ranges: Sequence[tuple[int, int, int]]) -> Draft:
    """Compile the IPC files or streams that are ranges of objects: (index of the object, begin, end). Raises as
    `compile_arrow`."""
    arrow = pyarrow_for(inputs.uri, "Arrow")
    return _compiled(arrow, inputs, _files(arrow, inputs, ranges))


def _files(arrow: Any, inputs: Inputs, ranges: Sequence[tuple[int, int, int]]) -> list[ArrowFile]:
    return [ArrowFile(arrow, inputs, at, found) for at, found in _read(inputs, ranges)]


def _compiled(arrow: Any, inputs: Inputs, files: Sequence[ArrowFile]) -> Draft:
    schema = arrow.schema([])
    for file in files:
        schema = united(arrow, schema, file.uri, plain_schema(arrow, file.schema))
    unread = {name: note for file in files for name, note in file.notes.items()}
    whole = arrow.schema([field for field in schema if field.name not in unread], schema.metadata)
    if not len(whole):
        raise InvalidInput(f"{inputs.uri} has no column of a type that is read: {', '.join(unread.values())}")
    read, notes = readable(arrow, whole, inputs.uri)
    notes += unread.values()
    features = features_of(read)
    wanted = [column_of(arrow, field, features.get(field.name)) for field in read]
    compiling = _Compiling(inputs, wanted)
    for file in files:
        compiling.add(file)
    draft = compiling.rows.draft(compiling.space, compiling.firsts, read, inputs)
    draft.notes += notes
    return draft


def _read(inputs: Inputs, ranges: Sequence[tuple[int, int, int]]) -> Iterator[tuple[int, IpcFile]]:
    def one(each: tuple[int, int, int]) -> tuple[int, IpcFile]:
        at, begin, end = each
        version = inputs.entries[at].object
        return at, read_ipc(
            version.uri, begin, end, lambda offset, length: inputs.fetch(version, offset, length)
        )

    for number, file in enumerate(in_threads(one, ranges)):
        inputs.progress(number + 1, len(ranges))
        yield file


class _Compiling:
    """Lays out the record batches of files whose columns must be like `wanted`."""

    def __init__(self, inputs: Inputs, wanted: Sequence[Column]) -> None:
        self._inputs, self._wanted = inputs, wanted
        self.space = AddressSpace([entry.object for entry in inputs.entries])
        self.firsts = array("q")
        self.rows = ColumnDraft(Partitions(inputs.entries))

    def add(self, file: ArrowFile) -> None:
        """Add the batches of a file."""
        by_name = {name: column for name, column, _ in file.columns if column is not None}
        for each in self._wanted:
            if each.name in by_name and not _alike(each, by_name[each.name]):
                raise InvalidInput(
                    f"{file.uri}: column {each.name!r} has another type than in other files: write it with one type"
                )
        schema = tuple(by_name.get(each.name, Column(each.name, "null")) for each in self._wanted)
        known: dict[int, Placed] = {}
        batches = [batch for batch in file.found.batches if batch.rows]
        for run in _runs(batches, self._inputs.options.extent_bytes):
            for batch in run:
                for dictionary in batch.dictionaries.values():
                    if id(dictionary) not in known:
                        known[id(dictionary)] = self._place(file, [dictionary])[0]
            for batch, placed in zip(run, self._place(file, run), strict=True):
                addresses = Walk(file, batch, placed, known).addresses(schema)
                self.rows.add(batch.rows, schema, addresses, file.at)

    def _place(self, file: ArrowFile, run: Sequence[Batch]) -> list[Placed]:
        """Make an extent of batches; return where the buffers of each lie."""
        self.firsts.append(self.rows.samples)
        if not run[0].codec:
            begin = run[0].begin - 8 * (run[0].begin == run[-1].end)  # no extent is empty
            start = self.space.add([(file.at, begin, run[-1].end - begin)])
            return [
                Placed(
                    [start + offset - begin for offset, _ in batch.buffers],
                    [length for _, length in batch.buffers],
                )
                for batch in run
            ]
        return [self._place_packed(file, batch) for batch in run]

    def _place_packed(self, file: ArrowFile, batch: Batch) -> Placed:
        """Make an extent of the buffers of a batch, each a piece that is decoded."""
        pieces, sizes = [], []
        for offset, length in batch.buffers.tolist():
            size = (
                int.from_bytes(file.fetch(file.version, offset, 8), "little", signed=True)
                if length >= 8
                else 0
            )
            if length and (length < 8 or size < -1 or size > _MOST_TIMES[batch.codec] * length):
                raise CorruptData(
                    f"{file.uri} is no Arrow file: a buffer of {length:,} bytes becomes {size:,}"
                )
            sizes.append(length - 8 if size == -1 else size)
            if sizes[-1]:
                codec = "" if size == -1 else batch.codec
                pieces.append(((file.at, offset + 8, sizes[-1]), codec, length - 8 if codec else 0))
        if sum(sizes) > MAX_BYTES:
            raise InvalidInput(
                f"{file.uri}: a record batch takes {sum(sizes):,} bytes decoded; write them below 4 GiB"
            )
        if not pieces:
            return Placed([self.space.add([(file.at, batch.begin - 8, 8)])] * len(sizes), sizes)
        start = self.space.add_packed(pieces)
        places = [start + sum(sizes[:at]) for at in range(len(sizes))]
        return Placed(places, sizes)


def _runs(batches: Sequence[Batch], extent_bytes: int) -> Iterator[list[Batch]]:
    """Yield the batches of each extent: one after another in the file, as many as fit; a compressed one alone."""
    run: list[Batch] = []
    for batch in batches:
        fits = run and run[-1].end <= batch.begin and batch.end - run[0].begin <= extent_bytes
        if run and (not fits or batch.codec or run[-1].codec):
            yield run
            run = []
        run.append(batch)
    if run:
        yield run


def _stored(column: Column) -> Column:
    """Return the column of a dictionary's values; a text for views of one."""
    while column.kind == "coded":
        column = column.children[0]
    return replace(column, kind="text") if column.kind == "view" else column


def _alike(one: Column, other: Column) -> bool:
    """Tell whether two columns have the same values in Python, however they are stored."""
    one, other = _stored(one), _stored(other)
    if "null" in (one.kind, other.kind):
        return True
    kinds = ["list" if each.kind == "fixed list" else each.kind for each in (one, other)]
    if kinds[0] != kinds[1] or one.means.split(":")[0] != other.means.split(":")[0]:
        return False
    if one.kind == "fixed" and not one.means:
        return (one.dtype[1] == "f") == (other.dtype[1] == "f")
    if one.kind == "struct":
        parts = {each.name: each for each in other.children}
        same = {each.name for each in one.children} == parts.keys()
        return same and all(_alike(each, parts[each.name]) for each in one.children)
    return all(map(_alike, one.children, other.children))
