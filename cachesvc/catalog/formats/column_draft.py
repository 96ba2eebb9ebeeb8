"""Drafts of datasets of columns: where the buffers of each chunk of rows lie, and the columns that folders name."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import Array, TextColumn, ints
from cachesvc.catalog.compiler import Draft, Inputs
from cachesvc.catalog.labels.hive_partitions import Partitions
from cachesvc.catalog.labels.tags import tag_name
from cachesvc.catalog.layout import Field
from cachesvc.core.errors import InvalidInput
from cachesvc.sources.columnar.arrow_types import Unread, classes_of, column_of, features_of
from cachesvc.sources.columnar.column import NO_BUFFER, Column

_MAX_TYPE_CHARS = 200


class ColumnDraft:
    """Collects the chunks of a dataset: runs of rows whose values lie in the same buffers."""

    def __init__(self, partitions: Partitions) -> None:
        self._partitions = partitions
        self._rows, self._schema, self._entry = array("q"), array("q"), array("q")
        self._addresses = array("q")
        self._schemas: list[tuple[Column, ...]] = []
        self.samples = 0
        """The number of rows so far."""

    def add(self, rows: int, schema: tuple[Column, ...], addresses: Sequence[int], entry: int) -> None:
        """Add a chunk of an entry, given the address of each buffer of its columns."""
        if schema not in self._schemas:
            self._schemas.append(schema)
        self._rows.append(rows)
        self.samples += rows
        self._schema.append(self._schemas.index(schema))
        self._entry.append(entry)
        self._addresses.extend(addresses)

    def draft(self, space: AddressSpace, firsts: Sequence[int], read: Any, inputs: Inputs) -> Draft:
        """Return the draft. `firsts`: the first sample of each extent. `read`: the schema of all files."""
        wanted = inputs.options.field_names
        shown = [each for each in self._partitions.columns(read.names) if not wanted or each.name in wanted]
        constants = self._partitions.values
        codes: dict[str | None, int] = {value: code for code, value in enumerate(constants)}
        given = [
            [codes.get(self._partitions.value(each.name, at), NO_BUFFER) for each in shown]
            for at in self._entry
        ]
        rows = ints(self._rows)
        fields = [Field(field.name, str(field.type)[:_MAX_TYPE_CHARS]) for field in read]
        return Draft(
            kind="columns",
            space=space,
            fields=(*fields, *(Field(each.name, each.means) for each in shown)),
            extent_first=ints([*firsts, self.samples]),
            head={"schemas": [[each.to_json() for each in (*shown, *schema)] for schema in self._schemas]},
            columns={
                "chunk.first": np.concatenate([np.zeros(1, np.int64), np.cumsum(rows)]),
                "chunk.schema": ints(self._schema),
                "chunk.address": self._table(given).reshape(-1),
                **TextColumn(constants).columns("constant"),
            },
            classes=classes_of(features_of(read), read.names),
            tags=self._tags(rows),
        )

    def _table(self, given: Sequence[Sequence[int]]) -> Array:
        """Return the addresses of each chunk, as many as the schema with the most buffers has."""
        widths = [sum(column.buffers for column in schema) for schema in self._schemas]
        shown = len(given[0]) if given else 0
        table = np.full((len(given), shown + max(widths, default=0)), NO_BUFFER, np.int64)
        table[:, :shown] = np.asarray(given, np.int64).reshape(len(given), shown)
        at, flat = 0, ints(self._addresses)
        for row, schema in enumerate(self._schema):
            width = widths[schema]
            table[row, shown : shown + width] = flat[at : at + width]
            at += width
        return table

    def _tags(self, rows: Array) -> dict[str, Array | tuple[Array, TextColumn]]:
        entries, tags = ints(self._entry), dict[str, Array | tuple[Array, TextColumn]]()
        for name in self._partitions.names:
            values = [self._partitions.value(name, at) for at in entries.tolist()]
            if self._partitions.is_whole(name):
                numbers = np.asarray([np.nan if value is None else float(value) for value in values])
                tags[tag_name(name)] = np.repeat(numbers, rows)
            else:
                texts = sorted({value for value in values if value is not None})
                index: Mapping[str | None, int] = {text: code for code, text in enumerate(texts)}
                codes = np.asarray([index.get(value, -1) for value in values], np.int32)
                tags[tag_name(name)] = np.repeat(codes, rows), TextColumn(texts)
        return tags


def readable(arrow: Any, schema: Any, uri: str) -> tuple[Any, list[str]]:
    """Return the fields of a schema that are read, and notes on the others. Raises InvalidInput where none is read."""
    columns, notes = [], []
    for field in schema:
        try:
            column_of(arrow, field)
        except Unread as error:
            notes.append(f"column {field.name} ({error}) has a type that is not read and is left out")
        else:
            columns.append(field)
    if not columns and len(schema):
        raise InvalidInput(f"{uri} has no column of a type that is read: {notes[0]}")
    return arrow.schema(columns, schema.metadata), notes
