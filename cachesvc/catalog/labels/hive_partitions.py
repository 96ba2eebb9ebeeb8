"""Recognises folders named like partitions of Hive and Spark, `year=2020/`, and the columns that they name."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator, Sequence
from functools import cached_property
from urllib.parse import unquote

from cachesvc.catalog.compiler import Draft, ListedObject
from cachesvc.sources.columnar.column import Column

_PARTITION = re.compile(r"[\w%][^/=]*=[^/]*")
_WHOLE = re.compile(r"-?(0|[1-9][0-9]{0,17})")
_NULL = "__HIVE_DEFAULT_PARTITION__"


def is_partition(folder: str) -> bool:
    """Tell whether a folder's name is `column=value`."""
    return _PARTITION.fullmatch(folder) is not None


def _folders(entries: Sequence[ListedObject]) -> Iterator[tuple[int, str, str]]:
    """Yield (entry, column, folder) for each partition folder below the URIs, or below what all have in common."""
    root = os.path.commonprefix([entry.object.uri for entry in entries]).rpartition("/")[0]  # noqa: RUF071
    for at, entry in enumerate(entries):
        for path in (entry.path, entry.object.uri[len(root) + 1 :]):
            if "=" in path:
                for folder in filter(is_partition, path.split("/")[:-1]):
                    yield at, folder.partition("=")[0], folder


class Partitions:
    """The columns that the folders of a dataset's files name, with a value for each file."""

    def __init__(self, entries: Sequence[ListedObject]) -> None:
        self._values: dict[str, dict[int, str]] = {}
        for at, name, folder in _folders(entries):
            value = unquote(folder.partition("=")[2])
            if value != _NULL:
                self._values.setdefault(unquote(name), {})[at] = value

    def __contains__(self, name: str) -> bool:
        return name in self._values

    @property
    def names(self) -> list[str]:
        """The names of the columns."""
        return list(self._values)

    @cached_property
    def values(self) -> list[str]:
        """All distinct values."""
        return sorted({value for column in self._values.values() for value in column.values()})

    def value(self, name: str, entry: int) -> str | None:
        """Return the value of a file, None where its folders name none."""
        return self._values[name].get(entry)

    def is_whole(self, name: str) -> bool:
        """Tell whether all values of a column are whole numbers."""
        return all(_WHOLE.fullmatch(value) for value in self._values[name].values())

    def columns(self, stored: Collection[str]) -> list[Column]:
        """Return the columns that the files do not store themselves."""
        return [
            Column(name, "constant", "whole" if self.is_whole(name) else "text")
            for name in self._values
            if name not in stored
        ]


def hive_notes(entries: Sequence[ListedObject], draft: Draft) -> list[str]:
    """Return the note on data in such folders, unless their columns are fields or tags, or their names the classes."""
    if any(map(is_partition, draft.classes)) or draft.kind == "columns":
        return []
    columns: dict[str, str] = {}
    for _, name, folder in _folders(entries):
        columns.setdefault(name, folder)
    for field in draft.fields:
        columns.pop(field.name, None)
    if not columns:
        return []
    named = ", ".join(columns)
    return [
        f"folders such as {next(iter(columns.values()))} are neither columns nor classes: no sample holds {named}; "
        "open one folder, or write the columns into the files"
    ]
