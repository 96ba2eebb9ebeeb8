"""Reads the footers of Parquet files, and decodes row groups to extents of columns.

The footer bounds the decoded size: of text and bytes by the uncompressed size of their column chunk, of numbers by their
count, since a dictionary's value is stored once. Where an encoding repeats values, the chunk is measured instead.
https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import Piece
from cachesvc.sources.columnar.arrow_types import field_at, part_at, plain_schema
from cachesvc.sources.columnar.column import ALL_NULL, NO_BUFFER, Column
from cachesvc.sources.columnar.extent import (
    ALIGNED_BYTES,
    ExtentWriter,
    Values,
    addresses,
    places,
    text_parts,
)
from cachesvc.sources.parquet.column_chunks import ColumnChunk, Leaves, count, leaves_of
from cachesvc.sources.parquet.recipe import Recipe, pyarrow_for, recipe_of

MAGIC = b"PAR1"
END_BYTES = 4 + len(MAGIC)
"""The bytes after the footer: its length and the magic."""
FOOTER_BYTES = 32 << 20
"""The longest footer that is read: pyarrow needs ten times as much memory for it."""
_GAP_BYTES = 4096
"""Column chunks that lie so close together are fetched as one range."""
_MEASURED_BYTES = 256 << 20
"""Memory for the values that are expanded at a time to measure a chunk."""
_MARK_BYTES = 8
"""Added to an extent for each row group, so that its size tells how many it holds."""
_EXTENSIONS = "arrow_extensions_enabled"
"""The argument of pyarrow that turns JSON into a type of its own, which is never read as a dictionary."""
MAX_RUN = 4096
"""The most row groups of an extent."""
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group with rows. `chunks`: its column chunks by leaf, of the leaves that are read. `rooms`: the most bytes
    that each buffer of the recipe's columns takes."""

    number: int
    rows: int
    begin: int
    chunks: dict[int, ColumnChunk]
    rooms: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupRun:
    """Row groups of one extent, its size, and the ranges of the file that it is decoded from."""

    groups: tuple[RowGroup, ...]
    size_bytes: int
    ranges: Ranges

    @property
    def rows(self) -> int:
        """The number of rows."""
        return sum(group.rows for group in self.groups)

    @property
    def rooms(self) -> list[int]:
        """The room of each buffer. Row groups of one file lack the same buffers."""
        columns = zip(*(group.rooms for group in self.groups), strict=True)
        return [sum(each) if each[0] >= 0 else each[0] for each in columns]

    def addresses(self, columns: Sequence[Column]) -> list[int]:
        """Return where each buffer lies in the extent, as a catalog states it."""
        return addresses(columns, places(self.rooms)[0])


def footer_bytes(data: bytes | memoryview) -> int:
    """Return the footer's length, given the last bytes of a file."""
    return int.from_bytes(data[-END_BYTES : -len(MAGIC)], "little")


class Footer:
    """The metadata of one file, read from its last bytes, `data`, which begin at the footer or before it. Raises
    CorruptData for a damaged footer, InvalidInput for columns that differ from its schema."""

    def __init__(self, uri: str, data: memoryview | bytes) -> None:
        self.arrow, self.uri = pyarrow_for(uri), uri
        self.size_bytes = len(data)
        length = footer_bytes(data)
        if length > FOOTER_BYTES:
            raise CorruptData(
                f"{uri} has a footer of {length:,} bytes; one of more than {FOOTER_BYTES:,} is not read"
            )
        with self._readable():
            probe = self.arrow.parquet.ParquetFile(self.arrow.BufferReader(self.arrow.py_buffer(data)))
            self._metadata, self._stored_schema = probe.metadata, probe.schema_arrow
            self._paths = [probe.schema.column(at).path for at in range(self._metadata.num_columns)]
            self.schema = plain_schema(self.arrow, self._stored_schema)
            self.names: list[str] = self.schema.names
            self._leaves = leaves_of(self.arrow, self._stored_schema)
        if sum(each.count for each in self._leaves) != len(self._paths):
            raise InvalidInput(f"{uri} does not have the columns that its schema tells")
        self._groups: dict[str, list[RowGroup]] = {}

    # ---- what the file holds

    def groups(self, recipe: Recipe, read: Callable[[int, int], bytes]) -> list[RowGroup]:
        """Return the row groups with rows, in the order of the file. `read(begin, end)` reads chunks that are measured.

        Raises CorruptData for row groups that overlap.
        """
        key = recipe.codec
        if key not in self._groups:
            self._groups[key] = self._describe(recipe, read)
        return self._groups[key]

    def _describe(self, recipe: Recipe, read: Callable[[int, int], bytes]) -> list[RowGroup]:
        parts = [self._part(name) for name in recipe.schema.names]
        wanted = [leaf for part in parts if part is not None and not part.is_null for leaf in part.leaves()]
        numbers = range(self._metadata.num_row_groups)
        described = [group for number in numbers if (group := self._chunks(number, wanted))]
        if any(later[2] <= group[2] for group, later in pairwise(described)):
            raise CorruptData(f"{self.uri}: row groups do not lie in the order of its footer")
        known = [chunks for _, _, _, chunks in described]
        coded = {leaf for chunks in known for leaf in wanted if chunks[leaf].has_dictionary}
        nulls = {leaf for chunks in known for leaf in wanted if chunks[leaf].nulls}
        found = []
        for number, rows, begin, chunks in described:
            sizes = {leaf: self._text_bytes(number, leaf, chunks[leaf], read) for leaf in wanted}
            rooms = _Rooms(chunks, sizes, coded, nulls)
            for column, part in zip(recipe.columns, parts, strict=True):
                rooms.add(column, part, rows)
            found.append(RowGroup(number, rows, begin, chunks, tuple(rooms.found)))
        return found

    def _part(self, path: str) -> Leaves | None:
        if field_at(self._stored_schema, path) is None:
            return None
        names = [path] if path in self.names else path.split(".")
        part: Leaves = self._leaves[self.names.index(names[0])]
        for name in names[1:]:
            part = part.children[name]
        return part

    def _chunks(
        self, number: int, wanted: Sequence[int]
    ) -> tuple[int, int, int, dict[int, ColumnChunk]] | None:
        """Return the number, the rows, the begin and the chunks of a row group, None for one without rows."""
        with self._readable():
            group = self._metadata.row_group(number)
            if group.num_columns != len(self._paths):
                raise ValueError(f"row group {number} has other columns than the schema")
            rows = count(group.num_rows)
            if not rows:
                return None
            chunks = {at: ColumnChunk.of(group.column(at)) for at in wanted}
            first = ColumnChunk.of(group.column(0)).begin if group.num_columns else len(MAGIC)
            begin = min([first, *(each.begin for each in chunks.values())])
            if begin < len(MAGIC):
                raise ValueError(f"row group {number} does not lie where its footer says")
        return number, rows, begin, chunks

    def _text_bytes(
        self, group: int, leaf: int, chunk: ColumnChunk, read: Callable[[int, int], bytes]
    ) -> int:
        """Return the most bytes that the values of a chunk take if they are text."""
        if not chunk.is_unbounded:
            return chunk.unpacked_bytes
        stored = _Part(read(chunk.begin, chunk.end), chunk.begin)
        at_once = max(1, _MEASURED_BYTES // max(1, chunk.unpacked_bytes))
        rows_at_once = min(
            8192, max(1, at_once * self._metadata.row_group(group).num_rows // max(1, chunk.values))
        )
        total = 0
        with self._readable():
            file = self._open(stored, ())
            for batch in file.iter_batches(rows_at_once, [group], [self._paths[leaf]], use_threads=False):
                total += _expanded_bytes(self.arrow, batch.column(0))
        return total

    # ---- decoding

    def decode(self, run: GroupRun, recipe: Recipe, stored: memoryview) -> Values:
        """Decode row groups to an extent. `stored` has the file's size and contains the run's ranges. Raises
        CorruptData."""
        files: dict[tuple[int, ...], Any] = {}
        writer = ExtentWriter(self.arrow, recipe.columns, run.rooms, self.uri)
        for group in run.groups:
            coded = tuple(sorted(at for at, chunk in group.chunks.items() if chunk.has_dictionary))
            file = files.get(coded) or files.setdefault(coded, self._open(stored, coded))
            for number, field in enumerate(recipe.schema):
                part = self._part(field.name)
                if part is None or self.arrow.types.is_null(part.kind):
                    continue
                with self._readable():
                    table = file.reader.read_row_group(group.number, part.leaves(), use_threads=False)
                    for chunk in part_at(self._stored_schema, table.column(0), field.name).chunks:
                        writer.add(number, chunk, field.type)
        self.arrow.default_memory_pool().release_unused()
        return writer.extent(run.rows, run.size_bytes)

    def _open(self, data: Any, coded: Sequence[int]) -> Any:
        """Open the file, to read text and bytes of the `coded` leaves as dictionaries: expanding what they repeat has no
        bound. JSON is read as text, since pyarrow expands its own type of it."""
        source = data if isinstance(data, _Part) else self.arrow.BufferReader(self.arrow.py_buffer(data))
        if isinstance(source, _Part):
            source = self.arrow.PythonFile(source, "r")
        found = self.arrow.parquet.ParquetFile
        known = inspect.signature(found).parameters  # earlier releases read JSON as text always
        return found(
            source,
            metadata=self._metadata,
            read_dictionary=[self._paths[leaf] for leaf in coded],
            page_checksum_verification=True,
            pre_buffer=False,
            **({_EXTENSIONS: False} if _EXTENSIONS in known else {}),
        )

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Translate exceptions of pyarrow to CorruptData."""
        arrow = self.arrow
        try:
            yield
        except (arrow.ArrowException, OSError, ValueError, TypeError, AttributeError, LookupError) as error:
            if isinstance(error, (MemoryError, CorruptData)):
                raise
            raise CorruptData(
                f"{self.uri} cannot be read as Parquet: {' '.join(str(error).split())}"
            ) from error


class _Rooms:
    """Counts the room of each buffer of one row group."""

    def __init__(
        self, chunks: dict[int, ColumnChunk], text_bytes: dict[int, int], coded: set[int], nulls: set[int]
    ) -> None:
        """`coded`: leaves that have a dictionary in some row group of the file; `nulls`: those that may have nulls."""
        self._chunks, self._text_bytes, self._coded, self._nulls = chunks, text_bytes, coded, nulls
        self.found: list[int] = []

    def add(self, column: Column, part: Leaves | None, items: int) -> None:
        """Add the buffers of a column, of which the file stores `part`, for so many values."""
        if column.kind == "null":
            return
        if part is None or not part.leaves() or part.is_null:
            self.found += [ALL_NULL, *[NO_BUFFER] * (column.buffers - 1)]
            return
        bits = -(-items // 8)
        leaves = part.leaves()
        listed = column.kind in ("list", "fixed list")
        nullable = part.nullable if listed else not self._nulls.isdisjoint(leaves)
        self.found.append(bits if nullable else NO_BUFFER)
        if column.kind == "fixed":
            self.found.append(items * np.dtype(column.dtype).itemsize)
        elif column.kind == "bool":
            self.found.append(bits)
        elif column.kind == "coded":
            (leaf,) = leaves
            some = self._chunks[leaf].has_dictionary
            self.found.append(4 * items if leaf in self._coded else NO_BUFFER)
            offsets = 8 if some else 4 * (items + 1)
            self.found += [NO_BUFFER, offsets + self._text_bytes[leaf], 0]
        elif column.kind == "list":
            self.found.append(4 * (items + 1))
            values = min(self._chunks[leaf].values for leaf in leaves)
            self.add(column.children[0], part.item, max(values, items * part.size))
        elif column.kind == "fixed list":
            self.add(column.children[0], part.item, items * column.size)
        else:
            for child in column.children:
                self.add(child, part.children.get(child.name), items)


class _Part(io.RawIOBase):
    """A range of a file as a file, for measuring."""

    def __init__(self, data: bytes, begin: int) -> None:
        self._data, self._begin, self._at = data, begin, 0

    def read(self, size: int = -1) -> bytes:
        low = self._at - self._begin
        self._at += size
        return self._data[max(0, low) : max(0, low + size)]

    def seek(self, at: int, whence: int = 0) -> int:
        self._at = at if whence == 0 else self._begin + len(self._data) + at
        return self._at

    def tell(self) -> int:
        return self._at

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True


def _expanded_bytes(arrow: Any, array: Any) -> int:
    """Return the bytes of the texts in an array of one leaf, inside lists and structs or not."""
    array = array.storage if isinstance(array, arrow.ExtensionArray) else array
    if arrow.types.is_struct(array.type):
        return _expanded_bytes(arrow, array.flatten()[0])
    if array.type.num_fields:
        return _expanded_bytes(arrow, array.flatten())
    kinds = (arrow.string(), arrow.large_string(), arrow.binary(), arrow.large_binary())
    return len(text_parts(arrow, array)[1]) if array.type in kinds else 0


def run_of(groups: Sequence[RowGroup]) -> GroupRun:
    """Return row groups as one extent."""
    spans = sorted({(each.begin, each.end) for group in groups for each in group.chunks.values()})
    joined: list[tuple[int, int]] = []
    for begin, end in spans:
        if joined and begin - joined[-1][1] <= _GAP_BYTES:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    ranges = tuple(joined) or ((groups[0].begin, groups[0].begin + 1),)  # no fill is without a read
    return GroupRun(tuple(groups), int(sizes_of(groups)[-1]), ranges)


def sizes_of(groups: Sequence[RowGroup]) -> npt.NDArray[np.int64]:
    """Return the sizes of extents of the first row group, of the first two, and so on."""
    rooms = np.maximum(np.cumsum([group.rooms for group in groups], axis=0, dtype=np.int64), 0)
    aligned = -(-rooms // ALIGNED_BYTES) * ALIGNED_BYTES
    sizes: npt.NDArray[np.int64] = aligned.sum(axis=1)
    return sizes + _MARK_BYTES * np.arange(1, len(groups) + 1)


def decoding(piece: Piece, footer: Footer, read: Callable[[int, int], bytes]) -> GroupRun:
    """Return the row groups of a piece. Raises CorruptData where the footer has none of its place and size."""
    groups = footer.groups(recipe_of(piece.codec), read)
    first = next((at for at, each in enumerate(groups) if each.begin == piece.offset), len(groups))
    some = groups[first : first + MAX_RUN]
    found = np.flatnonzero(sizes_of(some) == piece.length) if some else np.zeros(0, np.int64)
    if not len(found):
        raise CorruptData(f"{piece.object.uri} has other row groups than its catalog says: build it again")
    return run_of(some[: int(found[0]) + 1])
