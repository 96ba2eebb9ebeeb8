"""Column chunks of Parquet as the footer describes them: where each lies in the file, and how large it becomes decoded.
They are the leaves of the schema, a tree that follows Arrow's types.

https://parquet.apache.org/docs/file-format/metadata/
"""

from __future__ import annotations

from dataclasses import dataclass, field
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


@dataclass(slots=True)
class Leaves:
    """A column or a part of one: leaves `first` to `first + count` of the file. `children`: the fields of a struct by
    name; a list has `item`, a map an item with `key` and `value`. `size`: the items of each fixed-size list, null ones
    too; else 0."""

    kind: Any
    nullable: bool
    is_null: bool
    first: int
    count: int = 0
    size: int = 0
    children: dict[str, Leaves] = field(default_factory=dict)
    item: Leaves | None = None

    def leaves(self) -> list[int]:
        """Return the numbers of the leaves."""
        return list(range(self.first, self.first + self.count))


def leaves_of(arrow: Any, schema: Any) -> list[Leaves]:
    """Return the leaves of each column: nested types depth first."""
    found, at = [], 0
    for each in schema:
        found.append(_leaves(arrow, each.type, each.nullable, at))
        at += found[-1].count
    return found


def _leaves(arrow: Any, kind: Any, nullable: bool, first: int) -> Leaves:
    types = arrow.types
    kind = kind.storage_type if isinstance(kind, arrow.BaseExtensionType) else kind
    found = Leaves(kind, nullable, types.is_null(kind), first)
    if types.is_struct(kind):
        for at in range(kind.num_fields):
            each = kind.field(at)
            found.children[each.name] = _leaves(arrow, each.type, each.nullable, first + found.count)
            found.count += found.children[each.name].count
    elif types.is_map(kind):
        pair = Leaves(None, False, False, first)
        for name, each in (("key", kind.key_field), ("value", kind.item_field)):
            pair.children[name] = _leaves(arrow, each.type, each.nullable, first + pair.count)
            pair.count += pair.children[name].count
        found.item, found.count = pair, pair.count
    elif types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        found.item = _leaves(arrow, kind.value_type, kind.value_field.nullable, first)
        found.count = found.item.count
        found.size = kind.list_size if types.is_fixed_size_list(kind) else 0
    else:
        found.count = 1
    return found
