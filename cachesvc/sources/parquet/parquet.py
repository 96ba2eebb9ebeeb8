"""Reads the footers of Parquet files, and decodes row groups to rows that can be read one by one.

A decoded piece is a table of u32 (begin, length) pairs, one for each row and field, followed by the values and zeros. A
dictionary's value is stored once. So the footer bounds the size: of text and bytes by the uncompressed size of their
column chunk, of numbers and fixed-size binary values by their count.
https://parquet.apache.org/docs/file-format/
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.core.model import ObjectVersion, Piece
from cachesvc.sources.parquet.arrow import Leaf, leaves_of, values_of
from cachesvc.sources.parquet.column_chunks import ColumnChunk, count
from cachesvc.sources.parquet.nulls import room_bytes

ABSENT = 0xFFFFFFFF
"""The length of a value that is null."""
MAGIC = b"PAR1"
END_BYTES = 4 + len(MAGIC)
"""The bytes after the footer: its length and the magic."""
FOOTER_BYTES = 32 << 20
"""The longest footer that is read: pyarrow needs ten times as much memory for it."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group with rows. Its column chunks lie at [begin, end) in the file. `decoded_bytes`: the most bytes that it
    takes decoded. `has_dictionary`: for each leaf whether its chunk has a dictionary."""

    number: int
    rows: int
    begin: int
    end: int
    decoded_bytes: int
    has_dictionary: tuple[bool, ...]


def footer_bytes(data: bytes | memoryview) -> int:
    """Return the footer's length, given the last bytes of a file."""
    return int.from_bytes(data[-END_BYTES : -len(MAGIC)], "little")


class Footer:
    """The metadata of one file, read from its last bytes, `data`, which begin at the footer or before it. Raises
    CorruptData for a damaged footer, InvalidInput for columns that cannot be read."""

    def __init__(self, uri: str, data: memoryview | bytes) -> None:
        self._arrow, parquet = _pyarrow(uri)
        self._uri, self._data, self._parquet = uri, data, parquet
        length = footer_bytes(data)
        if length > FOOTER_BYTES:
            raise CorruptData(
                f"{uri} has a footer of {length:,} bytes; one of more than {FOOTER_BYTES:,} is not read"
            )
        with self._readable():
            probe = parquet.ParquetFile(self._arrow.BufferReader(self._arrow.py_buffer(data)))
            self._metadata = probe.metadata
            self.leaves, self.unread = leaves_of(self._arrow, probe.schema_arrow)
            columns = self._metadata.num_columns
        if columns != self.unread.columns or len({leaf.name for leaf in self.leaves}) < len(self.leaves):
            raise InvalidInput(f"{uri} has columns of the same name, or not those that its schema tells")
        self._files: dict[bool, Any] = {}

    def row_groups(self) -> list[RowGroup]:
        """Return the row groups with rows, in the order of the file. Raises CorruptData for row groups that overlap,
        InvalidInput for an encoding whose decoded size is unbounded."""
        found, at = [], len(MAGIC)
        for number in range(self._metadata.num_row_groups):
            rows, chunks = self._describe(number)
            if not rows:
                continue
            begin, end = min(each.begin for each in chunks), max(each.end for each in chunks)
            if begin < at:
                raise CorruptData(f"{self._uri}: row group {number} does not lie where its footer says")
            mine = tuple(chunks[leaf.column] for leaf in self.leaves)
            found.append(
                RowGroup(
                    number,
                    rows,
                    begin,
                    end,
                    self._decoded_bytes(rows, mine),
                    tuple(each.has_dictionary for each in mine),
                )
            )
            at = end
        return found

    def _describe(self, number: int) -> tuple[int, list[ColumnChunk]]:
        """Return the rows and the column chunks of a row group."""
        with self._readable():
            group = self._metadata.row_group(number)
            if group.num_columns != self.unread.columns:
                raise ValueError(f"row group {number} has other columns than the schema")
            return count(group.num_rows), [
                ColumnChunk.of(group.column(at)) for at in range(group.num_columns)
            ]

    def _decoded_bytes(self, rows: int, chunks: Sequence[ColumnChunk]) -> int:
        size = 8 * len(self.leaves) * rows
        for leaf, chunk in zip(self.leaves, chunks, strict=True):
            if unbounded := chunk.unbounded_encodings(leaf):
                raise InvalidInput(
                    f"{self._uri}: column {leaf.name!r} is encoded as {' and '.join(unbounded)}, which is not read of text "
                    "and bytes; write it with PLAIN or dictionary encoding"
                )
            values = max(chunk.values, rows * leaf.items)  # a null fixed-size list has items, too
            size += values * leaf.width if leaf.width else chunk.unpacked_bytes
            if leaf.encoding.startswith("array:"):
                size += room_bytes(min(rows, chunk.nulls), values)
        return size

    def rows(self, groups: Sequence[RowGroup], size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Decode row groups, whose bytes `data` contains, to exactly `size_bytes`. Raises CorruptData for more."""
        width, rows = len(self.leaves), sum(group.rows for group in groups)
        at, first = 8 * width * rows, 0
        if at > size_bytes:
            raise CorruptData(f"{self._uri} holds more rows than its catalog says")
        out = np.zeros(size_bytes, np.uint8)
        table = out[:at].view("<u4").reshape(rows, width, 2)
        for group in groups:
            for number, (leaf, coded) in enumerate(zip(self.leaves, group.has_dictionary, strict=True)):
                end = first
                for begins, lengths, data in self._values(group.number, leaf, coded and not leaf.width):
                    if at + len(data) > size_bytes or end + len(begins) > first + group.rows:
                        raise CorruptData(
                            f"{self._uri}: row group {group.number}, column {leaf.name!r} holds more than its footer says"
                        )
                    out[at : at + len(data)] = data
                    absent = lengths < 0
                    table[end : end + len(begins), number, 0] = np.where(absent, 0, begins + at)
                    table[end : end + len(begins), number, 1] = np.where(absent, ABSENT, lengths)
                    at, end = at + len(data), end + len(begins)
                if end < first + group.rows:
                    raise CorruptData(
                        f"{self._uri}: row group {group.number}, column {leaf.name!r} holds less than its footer says"
                    )
            first += group.rows
        self._arrow.default_memory_pool().release_unused()
        return out

    def _values(self, group: int, leaf: Leaf, coded: bool) -> Iterator[tuple[Any, Any, Any]]:
        """Yield the begins, lengths (-1 for null) and bytes of a column's values, for each of Arrow's chunks."""
        with self._readable():
            table = self._opened(coded).reader.read_row_group(group, [leaf.column], use_threads=False)
            while any(self._arrow.types.is_struct(kind) for kind in table.schema.types):
                table = table.flatten()
            chunks = table.column(0).chunks
        for chunk in chunks:
            with self._readable():
                found = values_of(self._arrow, chunk, leaf, coded)
            yield found

    def _opened(self, coded: bool) -> Any:
        """Open the file; if `coded`, to read text and bytes as dictionaries: expanding what they repeat has no bound."""
        if coded not in self._files:
            self._files[coded] = self._parquet.ParquetFile(
                self._arrow.BufferReader(self._arrow.py_buffer(self._data)),
                metadata=self._metadata,
                read_dictionary=[each.column for each in self.leaves if coded and not each.width],
                page_checksum_verification=True,
                pre_buffer=False,
            )
        return self._files[coded]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Translate exceptions of pyarrow to CorruptData."""
        try:
            yield
        except (
            self._arrow.ArrowException,
            OSError,
            ValueError,
            TypeError,
            AttributeError,
            LookupError,
        ) as error:
            if isinstance(error, MemoryError):
                raise
            raise CorruptData(
                f"{self._uri} cannot be read as Parquet: {' '.join(str(error).split())}"
            ) from error


def decode(piece: Piece, stored: memoryview) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Decode the rows of a piece. `stored` has its object's size and contains the piece's ranges. Raises CorruptData."""
    known, end = _row_groups_of.get(piece.object), piece.offset + piece.stored
    footer = Footer(piece.object.uri, stored)
    if known is None:
        if len(_row_groups_of) >= _MAX_REMEMBERED:
            _row_groups_of.clear()
        known = _row_groups_of[piece.object] = footer.row_groups()
    groups = [each for each in known if piece.offset <= each.begin and each.end <= end]
    return footer.rows(groups, piece.length)


_MAX_REMEMBERED = 8
_row_groups_of: dict[ObjectVersion, list[RowGroup]] = {}
"""Row groups of files that were decoded from lately, since the next extent is often of the same file. Reading them takes
4 us for each column and row group."""


def _pyarrow(uri: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidInput(
            f"{uri} is Parquet and pyarrow is not installed: pip install 'cachesvc[parquet]'"
        ) from None
    return pyarrow, pyarrow.parquet
