"""Parquet: what a footer says of its columns and row groups, and row groups decoded to rows that are read one by one.

Decoded, row groups are a table of u32 (begin, length) pairs, one for each row and field, and the values behind it. A value
that a dictionary holds once lies there once, so that a footer bounds the size: of bytes and text by the uncompressed size
of their column chunk, of numbers by their count. What remains is zeros.
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
from cachesvc.sources.thrift import Wanted, read_struct

ABSENT = 0xFFFFFFFF
"""The length of a value that is null."""
MAGIC = b"PAR1"
END_BYTES = 4 + len(MAGIC)
"""Behind the footer: its length and the magic."""
_DICTIONARIES, _DELTA_LENGTHS = frozenset({2, 8}), 6
_UNBOUNDED = {7: "DELTA_BYTE_ARRAY", 9: "BYTE_STREAM_SPLIT"}
"""Encodings of bytes that do not store each distinct value whole."""
_MOST = 1 << 48
"""Of rows, values and bytes: sums stay within int64."""


@dataclass(frozen=True, slots=True)
class Leaf:
    """One column of values: a field of samples. `column`: its number in the file. `width`: bytes of a number, 0 for bytes
    and text, of which each value has its own. `items`: of each list, where all are of one size."""

    name: str
    encoding: str
    column: int
    width: int
    items: int


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Where the column chunks of a row group lie in the file, [begin, end), and what it may take when it is decoded.
    `coded`: numbers of the columns that have a dictionary."""

    number: int
    rows: int
    begin: int
    end: int
    decoded_bytes: int
    coded: frozenset[int]


# Field ids of Parquet's structs: FileMetaData, RowGroup, ColumnChunk, ColumnMetaData.
_ROW_GROUPS = 4
_CHUNKS, _ROWS = 1, 3
_METADATA = 3
_ENCODINGS, _VALUES, _UNPACKED_BYTES, _PACKED_BYTES, _DATA, _DICTIONARY = 2, 5, 6, 7, 9, 11
_CHUNK: Wanted = {
    each: {} for each in (_ENCODINGS, _VALUES, _UNPACKED_BYTES, _PACKED_BYTES, _DATA, _DICTIONARY)
}
_WANTED: Wanted = {_ROW_GROUPS: {_ROWS: {}, _CHUNKS: {_METADATA: _CHUNK}}}


@dataclass(frozen=True, slots=True)
class _Chunk:
    """One column of one row group: its bytes in the file, [begin, end), with page headers; how many values, nulls and empty
    lists among them; its bytes without compression."""

    begin: int
    end: int
    values: int
    unpacked_bytes: int
    encodings: tuple[int, ...]

    @classmethod
    def of(cls, chunk: Any) -> _Chunk:
        """By the footer's struct. A dictionary lies before the data; some writers say 0 where there is none."""
        found = chunk[_METADATA]
        data, dictionary = _count(found[_DATA]), _count(found.get(_DICTIONARY, 0))
        begin = dictionary if 0 < dictionary < data else data
        end = begin + _count(found[_PACKED_BYTES])
        values, unpacked = _count(found[_VALUES]), _count(found[_UNPACKED_BYTES])
        return cls(begin, end, values, unpacked, tuple(map(_count, found[_ENCODINGS])))


def _count(value: Any) -> int:
    if not isinstance(value, int) or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} where a number of values or bytes should stand")
    return value


def footer_bytes(data: bytes | memoryview) -> int:
    """Of the footer alone, which the last bytes of a file tell."""
    return int.from_bytes(data[-END_BYTES : -len(MAGIC)], "little")


class Footer:
    """The metadata of one file, by its last bytes, from the footer's begin at least (`data`). Raises CorruptData, and
    InvalidInput for what is not read."""

    def __init__(self, uri: str, data: memoryview | bytes) -> None:
        self._arrow, parquet = _pyarrow(uri)
        self._uri = uri
        with self._readable():
            probe = parquet.ParquetFile(self._arrow.BufferReader(self._arrow.py_buffer(data)))
            self._metadata = probe.metadata
            self.leaves, self.left_out = _leaves(self._arrow, probe.schema_arrow)
            columns = self._metadata.num_columns
        if columns != self.left_out.columns or len({leaf.name for leaf in self.leaves}) < len(self.leaves):
            raise InvalidInput(f"{uri} has columns of the same name, or not those that its schema tells")
        self._data, self._parquet = data, parquet
        self._files: dict[bool, Any] = {}

    def row_groups(self) -> list[RowGroup]:
        """Those that have rows, in the order of the file. Raises CorruptData where they overlap or leave the file."""
        found, at = [], len(MAGIC)
        for number, (rows, chunks) in enumerate(self._described()):
            if not rows:
                continue
            begin, end = min(each.begin for each in chunks), max(each.end for each in chunks)
            if begin < at:
                raise CorruptData(f"{self._uri}: row group {number} does not lie where its footer says")
            coded = frozenset(
                at for at, each in enumerate(chunks) if _DICTIONARIES.intersection(each.encodings)
            )
            found.append(RowGroup(number, rows, begin, end, self._decoded_bytes(rows, chunks), coded))
            at = end
        return found

    def _described(self) -> list[tuple[int, list[_Chunk]]]:
        """Rows and chunks of every row group."""
        footer = memoryview(self._data)[-END_BYTES - footer_bytes(self._data) : -END_BYTES]
        with self._readable():
            groups = read_struct(footer, _WANTED)[_ROW_GROUPS]
            found = [(_count(each[_ROWS]), [_Chunk.of(chunk) for chunk in each[_CHUNKS]]) for each in groups]
            if any(len(chunks) != self.left_out.columns for _, chunks in found):
                raise ValueError("a row group has other columns than the schema")
        return found

    def _decoded_bytes(self, rows: int, chunks: Sequence[_Chunk]) -> int:
        size = 8 * len(self.leaves) * rows
        for leaf in self.leaves:
            chunk = chunks[leaf.column]
            odd = [_UNBOUNDED[each] for each in chunk.encodings if each in _UNBOUNDED]
            if _DELTA_LENGTHS in chunk.encodings and _DICTIONARIES.intersection(chunk.encodings):
                odd.append(
                    "dictionary and then DELTA_LENGTH_BYTE_ARRAY"
                )  # which pyarrow does not read as a dictionary
            if odd and not leaf.width:
                raise InvalidInput(
                    f"{self._uri}: column {leaf.name!r} is encoded as {' and '.join(odd)}, which is not read of text and "
                    "bytes; write it with PLAIN or dictionary encoding"
                )
            values = max(chunk.values, rows * leaf.items)  # a null list of one size has items too
            size += values * leaf.width if leaf.width else chunk.unpacked_bytes
        return size

    def rows(self, groups: Sequence[RowGroup], size_bytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """Row groups, whose bytes are there, decoded. Raises CorruptData for more than `size_bytes`."""
        width, rows = len(self.leaves), sum(group.rows for group in groups)
        at, first = 8 * width * rows, 0
        if at > size_bytes:
            raise CorruptData(f"{self._uri} holds more rows than its catalog says")
        out = np.zeros(size_bytes, np.uint8)
        table = out[:at].view("<u4").reshape(rows, width, 2)
        for group in groups:
            for number, leaf in enumerate(self.leaves):
                end = first
                for begins, lengths, data in self._values(group, leaf):
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

    def _values(self, group: RowGroup, leaf: Leaf) -> Iterator[tuple[Any, Any, Any]]:
        """Of each chunk of memory where values begin, their lengths, -1 where they are null, and their bytes."""
        coded = not leaf.width and leaf.column in group.coded
        with self._readable():
            table = self._opened(coded).read_row_group(group.number, columns=[leaf.name], use_threads=False)
            while any(self._arrow.types.is_struct(kind) for kind in table.schema.types):
                table = table.flatten()
            chunks = table.column(leaf.name).chunks
        for chunk in chunks:
            with self._readable():
                found = _bytes_of(self._arrow, chunk, leaf, coded)
            yield found

    def _opened(self, coded: bool) -> Any:
        """Reads text and bytes as dictionaries where they are `coded`: what they repeat may be without bounds."""
        if coded not in self._files:
            self._files[coded] = self._parquet.ParquetFile(
                self._arrow.BufferReader(self._arrow.py_buffer(self._data)),
                metadata=self._metadata,
                read_dictionary=[each.name for each in self.leaves if coded and not each.width],
                page_checksum_verification=True,
                pre_buffer=False,
            )
        return self._files[coded]

    @contextmanager
    def _readable(self) -> Iterator[None]:
        """Translates what pyarrow raises."""
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
    """The rows of a piece; `stored` is as large as its object, and holds the piece's ranges. Raises CorruptData."""
    footer, end = Footer(piece.object.uri, stored), piece.offset + piece.stored
    known = _known.get(piece.object)
    if known is None:
        if len(_known) >= _KNOWN:
            _known.clear()
        known = _known[piece.object] = footer.row_groups()
    groups = [each for each in known if piece.offset <= each.begin and each.end <= end]
    return footer.rows(groups, piece.length)


_KNOWN = 64
_known: dict[ObjectVersion, list[RowGroup]] = {}
"""Row groups of files of which an extent was decoded: 40 us a column and row group, and the next extent is of the same."""


@dataclass(slots=True)
class LeftOut:
    """Columns of types that are not read, in words, and how many columns there are in all."""

    names: list[str]
    columns: int


def _leaves(arrow: Any, schema: Any) -> tuple[list[Leaf], LeftOut]:
    """Columns as they lie in the file: those of nested types one after the other, depth first."""
    found: list[Leaf] = []
    left_out = LeftOut([], 0)

    def walk(name: str, kind: Any) -> None:
        if arrow.types.is_struct(kind):
            for field in kind:
                walk(f"{name}.{field.name}", field.type)
            return
        width, items, encoding = _kind(arrow, _storage(arrow, kind))
        if encoding:
            found.append(Leaf(name, encoding, left_out.columns, width, items))
        else:
            left_out.names.append(f"{name} ({kind})")
        left_out.columns += _columns(arrow, kind)

    for field in schema:
        walk(field.name, field.type)
    return found, left_out


def _storage(arrow: Any, kind: Any) -> Any:
    return kind.storage_type if isinstance(kind, arrow.BaseExtensionType) else kind


def _columns(arrow: Any, kind: Any) -> int:
    kind = _storage(arrow, kind)
    nested = [kind.field(at).type for at in range(kind.num_fields)]
    return sum(_columns(arrow, each) for each in nested) if nested else 1


def _kind(arrow: Any, kind: Any) -> tuple[int, int, str]:
    """Bytes of a number, items of a list where all are of one size, and how a field of such values is decoded; "" for types
    that are not read."""
    types = arrow.types
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or str(kind) == "string_view":
        return 0, 0, "str"
    binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    if binary or str(kind) == "binary_view":
        return 0, 0, "bytes"
    if _number(arrow, kind):
        return _dtype(arrow, kind).itemsize, 0, "bool" if types.is_boolean(kind) else _dtype(arrow, kind).name
    listed = types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind)
    if listed and _number(arrow, kind.value_type):
        dtype = _dtype(arrow, kind.value_type)
        items = kind.list_size if types.is_fixed_size_list(kind) else 0
        return dtype.itemsize, items, f"array:{'?' if types.is_boolean(kind.value_type) else dtype.str}"
    return 0, 0, ""


def _number(arrow: Any, kind: Any) -> bool:
    return bool(arrow.types.is_integer(kind) or arrow.types.is_floating(kind) or arrow.types.is_boolean(kind))


def _dtype(arrow: Any, kind: Any) -> np.dtype[Any]:
    return np.dtype(np.uint8 if arrow.types.is_boolean(kind) else kind.to_pandas_dtype())


def _bytes_of(arrow: Any, chunk: Any, leaf: Leaf, coded: bool) -> tuple[Any, Any, Any]:
    if isinstance(chunk.type, arrow.BaseExtensionType):
        chunk = chunk.storage
    absent = chunk.is_null().to_numpy(zero_copy_only=False)
    if not leaf.width:
        codes, values = np.arange(len(chunk)), chunk
        if coded:
            chunk = chunk if arrow.types.is_dictionary(chunk.type) else chunk.dictionary_encode()
            codes = chunk.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
            values = chunk.dictionary
        values = values.cast(arrow.large_binary())
        offsets = _held(values, np.dtype("<i8"), len(values) + 1)
        held = values.buffers()[2]
        data = np.frombuffer(held, np.uint8) if held is not None and held.size else np.zeros(0, np.uint8)
        data = data[offsets[0] : offsets[-1]]
        ends = np.append(offsets, offsets[-1:])  # all are null: there is no value 0
        begins = offsets[codes] - offsets[0]
        lengths = ends[codes + 1] - offsets[codes]
    elif leaf.encoding.startswith("array:"):
        bounds = _bounds(arrow, chunk)
        items = chunk.values.slice(bounds[0], bounds[-1] - bounds[0])
        if items.null_count and chunk.flatten().null_count:
            raise ValueError(f"column {leaf.name!r} holds nulls inside lists, which no array does")
        data = _plain(arrow, items, leaf.width)
        begins = (bounds[:-1] - bounds[0]) * leaf.width
        lengths = np.diff(bounds) * leaf.width
    else:
        if arrow.types.is_dictionary(chunk.type):
            chunk = chunk.dictionary_decode()
        data = _plain(arrow, chunk, leaf.width)
        begins = np.arange(len(chunk), dtype=np.int64) * leaf.width
        lengths = np.full(len(chunk), leaf.width, np.int64)
    return begins, np.where(absent, -1, lengths), data


def _bounds(arrow: Any, lists: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Where each list begins in `values`, and where the last one ends."""
    if arrow.types.is_fixed_size_list(lists.type):
        size: int = lists.type.list_size
        return size * (int(lists.offset) + np.arange(len(lists) + 1, dtype=np.int64))
    return np.asarray(lists.offsets.to_numpy(zero_copy_only=False), np.int64)


def _plain(arrow: Any, numbers: Any, width: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    if arrow.types.is_boolean(numbers.type):
        numbers = numbers.cast(arrow.uint8())
    return _held(numbers, np.dtype(f"V{width}"), len(numbers)).view(np.uint8)


def _held(array: Any, dtype: np.dtype[Any], count: int) -> np.ndarray[Any, Any]:
    """The fixed-size buffer of an array, which may begin before it; whatever stands where values are null."""
    found = array.buffers()[1]
    if found is None or not found.size:
        return np.zeros(count, dtype)
    return np.frombuffer(found, dtype, count, array.offset * dtype.itemsize)


def _pyarrow(uri: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidInput(
            f"{uri} is Parquet and pyarrow is not installed: pip install 'cachesvc[parquet]'"
        ) from None
    return pyarrow, pyarrow.parquet
