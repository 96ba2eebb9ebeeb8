"""The type of a column as a reader of its buffers needs it: a tree, in which each node has a few buffers.

https://arrow.apache.org/docs/format/Columnar.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

VALIDITY = 0
"""The number of the validity bitmap among a node's buffers; a bit is set for a value that is not null."""
BUFFERS = {
    "fixed": ("validity", "values"),
    "bool": ("validity", "bits"),
    "text": ("validity", "offsets", "bytes"),
    "view": ("validity", "views"),
    "list": ("validity", "offsets"),
    "fixed list": ("validity",),
    "struct": ("validity",),
    "coded": ("validity", "codes"),
    "constant": ("number",),
    "null": (),
}
"""The buffers of a node by its kind, in their order. A catalog stores the address of each, or one of the two below."""
NO_BUFFER = -1
"""Stands for a buffer that is not there: without a bitmap no value is null, without codes values are as they lie."""
ALL_NULL = -2
"""Stands for the bitmap of a column whose values are all null, so that it has no buffers."""
MAX_DEPTH = 32
"""The deepest nesting that is read: a schema may state any depth."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or a part of one.

    `kind`: a key of `BUFFERS`. `means`: how Python shows a value, "" for numbers, structs and lists; see `to_python` of
    `loader/datasets/samples`. `dtype`: of the values of "fixed" ("V16" for 16 bytes), of the offsets of "text" and
    "list", of the codes of "coded". `size`: the items of each list of "fixed list"; the buffers of bytes that follow those
    of a "view", a text whose short values lie in its views. `children`: the items of a list, the
    fields of a struct, the values of "coded".
    """

    name: str
    kind: str
    means: str = ""
    dtype: str = ""
    size: int = 0
    children: tuple[Column, ...] = ()

    @property
    def buffers(self) -> int:
        """The number of buffers of this node and all below it."""
        return sum(each.own_buffers for each in self.nodes())

    @property
    def own_buffers(self) -> int:
        """The number of buffers of this node alone."""
        return len(BUFFERS[self.kind]) + (self.size if self.kind == "view" else 0)

    def nodes(self) -> Iterator[Column]:
        """Yield this node and all below it, depth first: the order of their buffers."""
        yield self
        for child in self.children:
            yield from child.nodes()

    def mapped(self, change: Callable[[Column], Column]) -> Column:
        """Return the tree with each node changed, children before their parents."""
        return change(replace(self, children=tuple(child.mapped(change) for child in self.children)))

    def to_json(self) -> list[Any]:
        """Return the tree as JSON holds it."""
        children = [child.to_json() for child in self.children]
        return [self.name, self.kind, self.means, self.dtype, self.size, children]

    @classmethod
    def from_json(cls, found: Any, depth: int = 0) -> Column:
        """The inverse of `to_json`. Raises ValueError, TypeError or KeyError for anything else."""
        name, kind, means, dtype, size, children = found
        if depth > MAX_DEPTH or kind not in BUFFERS:
            raise ValueError(f"a column of kind {kind!r} at depth {depth}")
        nested = tuple(cls.from_json(child, depth + 1) for child in children)
        if len(nested) != {"list": 1, "fixed list": 1, "coded": 1}.get(kind, len(nested)):
            raise ValueError(f"a {kind} of {len(nested)} columns")
        return cls(str(name), kind, str(means), str(dtype), int(size), nested)


def firsts(columns: Sequence[Column]) -> list[int]:
    """Return the number of each column's first buffer among the buffers of all, and the number of all."""
    found = [0]
    for column in columns:
        found.append(found[-1] + column.buffers)
    return found
