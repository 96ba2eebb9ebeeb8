"""Finds the buffers of each column in the record batches of an Arrow file.

Fields and buffers follow one another depth first, so what is not read must be known, too, in order to be skipped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cachesvc.catalog.compiler import Inputs
from cachesvc.catalog.formats.arrow_ipc import MAGIC, Batch, IpcFile
from cachesvc.core.errors import CorruptData
from cachesvc.sources.columnar.arrow_types import Unread, column_of, features_of
from cachesvc.sources.columnar.column import BUFFERS, NO_BUFFER, Column

_VIEW_BYTES = 16


class ArrowFile:
    """A file, and its columns as they lie in it."""

    def __init__(self, arrow: Any, inputs: Inputs, at: int, found: IpcFile) -> None:
        self.at, self.found, self.fetch, self.types = at, found, inputs.fetch, arrow.types
        self.version = inputs.entries[at].object
        self.uri = self.version.uri
        self.notes: dict[str, str] = {}
        """On each column that is not read."""
        self.columns: list[tuple[str, Column | None, Any]] = []
        """The name, the column (None if it is not read) and the type of each field."""
        try:
            raw = arrow.py_buffer(found.schema)
            in_file = found.schema.startswith(MAGIC)
            self.schema = arrow.ipc.open_file(raw).schema if in_file else arrow.ipc.read_schema(raw)
            features = features_of(self.schema)
            for field in self.schema:
                self.columns.append(
                    (field.name, self._column(arrow, field, features.get(field.name)), field.type)
                )
        except (arrow.ArrowException, OSError, ValueError) as error:  # also for names that are not UTF-8
            raise CorruptData(f"{self.uri} is no Arrow file: {error}; write it anew") from error

    def _column(self, arrow: Any, field: Any, feature: Any) -> Column | None:
        try:
            return column_of(arrow, field, feature).mapped(self._with_views)
        except Unread as error:
            note = f"column {field.name} ({error}) has a type that is not read and is left out"
            self.notes[field.name] = note
            return None

    def _with_views(self, column: Column) -> Column:
        """Return a column of views with room for the buffers of any of them."""
        dictionaries = [each for batch in self.found.batches for each in batch.dictionaries.values()]
        counts = [count for batch in (*self.found.batches, *dictionaries) for count in batch.views]
        return replace(column, size=max(counts, default=0)) if column.kind == "view" else column


class Placed:
    """The addresses of a batch's buffers, and their sizes."""

    def __init__(self, addresses: Sequence[int], sizes: Sequence[int]) -> None:
        self.addresses, self.sizes = addresses, sizes


class Walk:
    """Walks the nodes and buffers of a batch in the order of its fields."""

    def __init__(
        self, file: ArrowFile, batch: Batch, placed: Placed, dictionaries: dict[int, Placed]
    ) -> None:
        self._file, self._batch, self._placed, self._dictionaries = file, batch, placed, dictionaries
        self._nodes: list[list[int]] = batch.nodes.tolist()
        self._node = self._buffer = self._view = self._id = 0

    def addresses(self, schema: Sequence[Column]) -> list[int]:
        """Return the address of each buffer of the columns of a schema, which are this file's or null."""
        by_column: dict[str, list[int]] = {}
        for name, column, kind in self._file.columns:
            begin = self._node
            if column is None:
                self._skip(kind)
            else:
                by_column[name] = self._column(column)
            if begin < len(self._nodes) and self._nodes[begin][0] != self._batch.rows:
                raise self._corrupt(
                    f"column {name!r} does not have the {self._batch.rows:,} rows of its batch"
                )
        if (self._node, self._buffer) != (len(self._nodes), len(self._batch.buffers)):
            raise self._corrupt("a record batch does not have the columns of its schema")
        return [address for column in schema for address in by_column.get(column.name, ())]

    def _column(self, column: Column) -> list[int]:
        length, nulls = self._next_node()
        if column.kind == "null":
            return []
        names = BUFFERS[column.kind]
        taken = [self._next_buffer() for _ in names]
        if column.kind == "view":
            count = self._next_views()
            taken += [self._next_buffer() for _ in range(count)] + [(NO_BUFFER, 0)] * (column.size - count)
        nulls = nulls if nulls >= 0 else taken[0][1]
        needed = {"view": _VIEW_BYTES * length, "bool": -(-length // 8)}
        needed |= dict.fromkeys(("fixed", "coded"), _width(column) * length)
        needed |= dict.fromkeys(("text", "list"), _width(column) * (length + 1) if length else 0)
        if len(names) > 1 and taken[1][1] < needed[column.kind]:
            raise self._corrupt(f"column {column.name!r} is shorter than its {length:,} rows")
        if nulls and taken[0][1] < -(-length // 8):
            raise self._corrupt(f"column {column.name!r} has fewer bits than its {length:,} rows")
        buffers = [taken[0][0] if nulls else NO_BUFFER, *(address for address, _ in taken[1:])]
        if column.kind == "coded":
            return buffers + self._dictionary(column.children[0])
        for child in column.children:
            begin = self._node
            buffers += self._column(child)
            if column.kind != "list" and self._nodes[begin][0] < length * max(1, column.size):
                raise self._corrupt(
                    f"column {column.name!r} has parts that are shorter than its {length:,} rows"
                )
        return buffers

    def _dictionary(self, values: Column) -> list[int]:
        number = self._file.found.ids[self._id] if self._id < len(self._file.found.ids) else -1
        self._id += 1
        batch = self._batch.dictionaries.get(number)
        if batch is None:
            raise self._corrupt(f"dictionary {number} is missing")
        inner = Walk(self._file, batch, self._dictionaries[id(batch)], self._dictionaries)
        inner._id = self._id
        buffers = inner._column(values)
        self._id = inner._id
        return buffers

    def _skip(self, kind: Any) -> None:
        """Skip a column that is not read."""
        types = self._file.types
        kind = getattr(kind, "storage_type", kind)
        self._next_node()
        name = str(kind)
        if types.is_dictionary(kind):
            self._id += _dictionaries_in(types, kind)
            count = 2
        elif name in ("string_view", "binary_view"):
            count = 2 + self._next_views()
        elif types.is_null(kind) or name.startswith("run_end_encoded"):
            count = 0
        elif types.is_union(kind):
            count = 2 if "dense" in name else 1
        elif "list_view" in name.partition("<")[0]:
            count = 3
        elif types.is_struct(kind) or types.is_fixed_size_list(kind):
            count = 1
        else:
            text = types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind)
            count = 3 if text or types.is_large_binary(kind) else 2
        self._buffer += count
        if types.is_map(kind):
            self._next_node()
            self._buffer += 1
            self._skip(kind.key_type)
            self._skip(kind.item_type)
            return
        for at in range(kind.num_fields):
            self._skip(kind.field(at).type)

    def _next_views(self) -> int:
        self._view += 1
        if self._view > len(self._batch.views):
            raise self._corrupt("a record batch does not have the columns of its schema")
        return self._batch.views[self._view - 1]

    def _next_node(self) -> tuple[int, int]:
        self._node += 1
        if self._node > len(self._nodes):
            raise self._corrupt("a record batch does not have the columns of its schema")
        length, nulls = self._nodes[self._node - 1]
        return length, nulls

    def _next_buffer(self) -> tuple[int, int]:
        self._buffer += 1
        if self._buffer > len(self._placed.addresses):
            raise self._corrupt("a record batch does not have the columns of its schema")
        return self._placed.addresses[self._buffer - 1], self._placed.sizes[self._buffer - 1]

    def _corrupt(self, why: str) -> CorruptData:
        return CorruptData(f"{self._file.uri} is no whole Arrow file: {why}; write it anew")


def _dictionaries_in(types: Any, kind: Any) -> int:
    """Return the number of dictionaries of a type, those in their values too."""
    if types.is_dictionary(kind):
        return 1 + _dictionaries_in(types, kind.value_type)
    return sum(_dictionaries_in(types, kind.field(at).type) for at in range(kind.num_fields))


def _width(column: Column) -> int:
    return np.dtype(column.dtype).itemsize if column.dtype else 0
