"""Column chunks of Parquet and their pages: what their headers say, held against the footer before pyarrow unfolds them.

pyarrow makes room for what a page says of itself. A page that says more than its footer, by its size, by its number of
values or of their lengths, or that hides an encoding that repeats values without bounds, is refused.
https://parquet.apache.org/docs/file-format/data-pages/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cachesvc.sources.parquet.arrow import Leaf
from cachesvc.sources.parquet.thrift import FLAG, I32, I64, Wanted, read_struct, varint

_DICTIONARIES, _DELTA_LENGTHS, _PREFIXES = frozenset({2, 8}), 6, 7
_UNBOUNDED = {_PREFIXES: "DELTA_BYTE_ARRAY", 9: "BYTE_STREAM_SPLIT"}
"""Encodings of bytes that do not store each distinct value whole. Prefixes may make a value longer than its type says."""
_LEVELS = 3
"""The encoding of levels (RLE); the one before it is written by nobody any more."""
_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}
_MOST = 1 << 48
"""Of rows, values and bytes: sums stay within int64."""
_PAGE_SLACK_BYTES = 64 << 10

# Field ids of Parquet's structs: ColumnMetaData (and in it Statistics), PageHeader, DataPageHeader, DataPageHeaderV2.
_ENCODINGS, _CODEC, _VALUES, _UNPACKED_BYTES, _PACKED_BYTES, _DATA, _DICTIONARY = 2, 4, 5, 6, 7, 9, 11
_STATISTICS, _NULLS = 12, 3
CHUNK: Wanted = {
    _ENCODINGS: {},
    _CODEC: I32,
    _STATISTICS: {_NULLS: I64},
    **dict.fromkeys((_VALUES, _UNPACKED_BYTES, _PACKED_BYTES, _DATA, _DICTIONARY), I64),
}
_PAGE_UNPACKED_BYTES, _PAGE_PACKED_BYTES, _PAGE_DATA, _PAGE_DATA_V2 = 2, 3, 5, 8
_DATA_VALUES, _DATA_ENCODING, _DATA_OPTIONAL, _DATA_REPEATED = 1, 2, 3, 4
_V2_ENCODING, _V2_OPTIONAL_BYTES, _V2_REPEATED_BYTES, _V2_PACKED = 4, 5, 6, 7
_PAGE: Wanted = {
    _PAGE_UNPACKED_BYTES: I32,
    _PAGE_PACKED_BYTES: I32,
    _PAGE_DATA: dict.fromkeys((_DATA_VALUES, _DATA_ENCODING, _DATA_OPTIONAL, _DATA_REPEATED), I32),
    _PAGE_DATA_V2: {
        **dict.fromkeys((_DATA_VALUES, _V2_ENCODING, _V2_OPTIONAL_BYTES, _V2_REPEATED_BYTES), I32),
        _V2_PACKED: FLAG,
    },
}


@dataclass(frozen=True, slots=True)
class Chunk:
    """One column of one row group: its bytes in the file, [begin, end), with page headers; how many values, nulls and empty
    lists among them, and how many of these, at most; its bytes without compression."""

    begin: int
    end: int
    values: int
    nulls: int
    unpacked_bytes: int
    encodings: tuple[int, ...]
    codec: int

    @property
    def coded(self) -> bool:
        """Whether it has a dictionary."""
        return not _DICTIONARIES.isdisjoint(self.encodings)

    @classmethod
    def of(cls, found: Any) -> Chunk:
        """By the footer's struct. A dictionary lies before the data; some writers say 0 where there is none."""
        data, dictionary = count(found[_DATA]), count(found.get(_DICTIONARY, 0))
        begin = dictionary if 0 < dictionary < data else data
        end = begin + count(found[_PACKED_BYTES])
        values, unpacked = count(found[_VALUES]), count(found[_UNPACKED_BYTES])
        nulls = found.get(_STATISTICS, {}).get(_NULLS, values)
        return cls(
            begin,
            end,
            values,
            nulls if 0 <= nulls <= values else values,
            unpacked,
            tuple(map(count, found[_ENCODINGS])),
            count(found[_CODEC]),
        )

    def unread(self, leaf: Leaf) -> list[str]:
        """The names of its encodings by which nobody can say what it unfolds to."""
        found = [_UNBOUNDED[each] for each in self.encodings if _unbounded(leaf, each)]
        if _DELTA_LENGTHS in self.encodings and self.coded and not leaf.width:
            # which pyarrow does not read as a dictionary
            found.append("dictionary and then DELTA_LENGTH_BYTE_ARRAY")
        return found


def count(value: Any) -> int:
    """What a footer or header says; ValueError for what is no number of values or bytes."""
    if not isinstance(value, int) or not 0 <= value < _MOST:
        raise ValueError(f"{value!r} where a number of values or bytes should stand")
    return value


def _unbounded(leaf: Leaf, encoding: int | None) -> bool:
    return encoding == _PREFIXES or (not leaf.width and encoding in _UNBOUNDED)


class Pages:
    """Those of one chunk of a file, `data`. `optional`, `repeated`: whether its values have levels of these kinds."""

    def __init__(
        self, arrow: Any, data: memoryview, leaf: Leaf, chunk: Chunk, optional: bool, repeated: bool
    ) -> None:
        self._arrow, self._data, self._leaf, self._chunk = arrow, data, leaf, chunk
        self._optional, self._repeated = optional, repeated

    def check(self) -> None:
        """Raises ValueError, and what pyarrow raises, for a page that would unfold to more than the footer says, before it
        does."""
        leaf, chunk = self._leaf, self._chunk
        at, values, left = chunk.begin, chunk.values, chunk.unpacked_bytes
        if leaf.width:  # a page holds each value once, in an index and a dictionary at most, and its levels
            left = chunk.values * (2 * leaf.width + 16) + _PAGE_SLACK_BYTES
        while at < chunk.end:
            header, taken = read_struct(self._data[at : chunk.end], _PAGE)
            unpacked, begin = count(header[_PAGE_UNPACKED_BYTES]), at + taken
            at = begin + count(header[_PAGE_PACKED_BYTES])
            if _PAGE_DATA in header and _PAGE_DATA_V2 in header:
                raise ValueError(f"column {leaf.name!r} has a page with two headers")
            data, data_v2 = header.get(_PAGE_DATA, {}), header.get(_PAGE_DATA_V2, {})
            values -= count(data.get(_DATA_VALUES, data_v2.get(_DATA_VALUES, 0)))
            if unpacked > left or values < 0:
                raise ValueError(f"column {leaf.name!r} has pages that unfold to more than its footer says")
            left -= 0 if leaf.width else unpacked
            encoding = data.get(_DATA_ENCODING, data_v2.get(_V2_ENCODING))
            self._check_encoding(encoding)
            if encoding == _DELTA_LENGTHS:
                self._check_lengths(header, self._data[begin:at], unpacked)

    def _check_encoding(self, encoding: int | None) -> None:
        leaf = self._leaf
        repeats = encoding in _DICTIONARIES and not self._chunk.coded and not leaf.width
        if repeats or _unbounded(leaf, encoding):
            raise ValueError(f"column {leaf.name!r} has pages in an encoding that its footer does not tell")

    def _check_lengths(self, header: Any, page: memoryview, unpacked_bytes: int) -> None:
        """That a page has no more lengths than values: pyarrow makes room for as many as stand behind the levels."""
        if _PAGE_DATA_V2 in header:
            said = header[_PAGE_DATA_V2]
            levels = count(said.get(_V2_OPTIONAL_BYTES, 0)) + count(said.get(_V2_REPEATED_BYTES, 0))
            packed = said.get(_V2_PACKED, True)
            body = self._unpacked(page[levels:], unpacked_bytes - levels) if packed else page[levels:]
        else:
            said = header[_PAGE_DATA]
            body = self._unpacked(page, unpacked_bytes)
            for present, coded in (
                (self._repeated, said.get(_DATA_REPEATED)),
                (self._optional, said.get(_DATA_OPTIONAL)),
            ):
                if present and coded != _LEVELS:
                    raise ValueError(f"column {self._leaf.name!r} has levels in an encoding of old")
                body = body[4 + int.from_bytes(body[:4], "little") :] if present else body
        lengths, at = 0, 0
        for _ in range(3 if len(body) else 0):  # a block's size, its parts, and how many lengths there are
            lengths, at = varint(body, at)
        if lengths > count(said.get(_DATA_VALUES, 0)):
            raise ValueError(f"column {self._leaf.name!r} has a page of more lengths than values")

    def _unpacked(self, page: memoryview, unpacked_bytes: int) -> memoryview:
        codec = self._chunk.codec
        if not codec or not len(page):
            return page
        if codec not in _CODECS or unpacked_bytes < 0:
            raise ValueError(f"column {self._leaf.name!r} is compressed in a way that is not read")
        return memoryview(self._arrow.Codec(_CODECS[codec]).decompress(page, unpacked_bytes, asbytes=True))
