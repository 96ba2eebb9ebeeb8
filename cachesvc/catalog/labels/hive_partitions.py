"""Recognises folders named like partitions of Hive and Spark: `year=2020/`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from cachesvc.catalog.compiler import Draft, ListedObject

_PARTITION = re.compile(r"[A-Za-z_][^/=]*=[^/]*")


def is_partition(folder: str) -> bool:
    """Tell whether a folder's name is `column=value`."""
    return _PARTITION.fullmatch(folder) is not None


def hive_notes(entries: Sequence[ListedObject], draft: Draft) -> list[str]:
    """Return the note on data in such folders, unless their columns are fields, or their names the classes."""
    if any(map(is_partition, draft.classes)):
        return []
    root = os.path.commonprefix([entry.object.uri for entry in entries]).rpartition("/")[0]  # noqa: RUF071
    columns: dict[str, str] = {}
    for entry in entries:
        for path in (entry.path, entry.object.uri[len(root) + 1 :]):
            if "=" in path:
                for folder in filter(is_partition, path.split("/")[:-1]):
                    columns.setdefault(folder.partition("=")[0], folder)
    for field in draft.fields:
        columns.pop(field.name, None)
    if not columns:
        return []
    named = ", ".join(columns)
    return [
        f"folders such as {next(iter(columns.values()))} are neither columns nor classes: no sample holds {named}; "
        "open one folder, or write the columns into the files"
    ]
