"""The leaves of a Parquet schema, which are its column chunks, as a tree that follows Arrow's types."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


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
