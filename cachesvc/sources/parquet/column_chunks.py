"""Column chunks of Parquet as the footer describes them: where each lies in the file, and how large it becomes decoded.

https://parquet.apache.org/docs/file-format/metadata/
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_DICTIONARIES = frozenset({"PLAIN_DICTIONARY", "RLE_DICTIONARY"})
_PREFIXES, _DELTA_LENGTHS = "DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"
_MAX_COUNT = 1 << 48
"""Of rows, values and bytes: sums stay within int64."""


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group: its bytes in the file, [begin, end), with page headers; its values, with nulls and
    empty lists; the most of them that are null; its bytes without compression."""

    begin: int
    end: int
    values: int
    nulls: int
    unpacked_bytes: int
    encodings: frozenset[str]

    @property
    def has_dictionary(self) -> bool:
        """True if the chunk stores distinct values once, in a dictionary that pyarrow reads as one."""
        return not _DICTIONARIES.isdisjoint(self.encodings) and not self.is_unbounded

    @property
    def is_unbounded(self) -> bool:
        """True if the footer does not bound the decoded size of text or bytes, since values are not stored whole, or
        pyarrow repeats what a dictionary stores once."""
        delta = self.encodings & {_PREFIXES, _DELTA_LENGTHS}
        return _PREFIXES in delta or bool(delta and not _DICTIONARIES.isdisjoint(self.encodings))

    @classmethod
    def of(cls, found: Any) -> ColumnChunk:
        """Make one from pyarrow's `ColumnChunkMetaData`. Raises ValueError for numbers that no file has."""
        # A dictionary lies before the data; some writers say 0 where there is none.
        data, dictionary = count(found.data_page_offset), count(found.dictionary_page_offset or 0)
        begin = dictionary if 0 < dictionary < data else data
        values, statistics = count(found.num_values), found.statistics
        nulls = statistics.null_count if statistics is not None and statistics.has_null_count else values
        return cls(
            begin,
            begin + count(found.total_compressed_size),
            values,
            nulls if 0 <= nulls <= values else values,
            count(found.total_uncompressed_size),
            frozenset(found.encodings),
        )


def count(value: int) -> int:
    """Check a number of rows, values or bytes in a footer. Raises ValueError."""
    if not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{value!r} where a number of values or bytes should stand")
    return value
