"""Reads the `index.json` of MDS and litData: finds it among the objects, and checks the types of its fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cachesvc.catalog.compiler import Inputs, ListedObject
from cachesvc.catalog.parsing.json_stream import JsonStream
from cachesvc.core.errors import CorruptData, InvalidInput

_INDEX_BYTES = 512 << 20
"""Limit of an index, about a million shards. It is parsed in windows (`json_stream.py`)."""


def indices(inputs: Inputs, tool: str) -> list[ListedObject]:
    """Return the index of each URI: the one directly below it, which may list its subfolders' shards, else its only one.

    Raises InvalidInput where there is none or several.
    """
    below: dict[str, list[ListedObject]] = {}
    for entry in inputs.entries:
        if entry.name == "index.json":
            below.setdefault(entry.object.uri.removesuffix(entry.path), []).append(entry)
    if not below:
        raise InvalidInput(f"{inputs.uri} has {tool} shards but no index.json")
    chosen = []
    for root, found in below.items():
        top = [entry for entry in found if entry.path == "index.json"]
        if not top and len(found) > 1:
            paths = ", ".join(entry.path for entry in found[:4])
            raise InvalidInput(f"{root} holds {len(found)} {tool} datasets ({paths}): open one of them")
        chosen += top or found
    return chosen


def stream_of(inputs: Inputs, index: ListedObject) -> JsonStream:
    """Begin to parse an index. Raises CorruptData for one beyond the limit."""
    uri, size = index.object.uri, index.object.size_bytes
    if size > _INDEX_BYTES:
        raise CorruptData(f"{uri} has {size} bytes; an index of more than {_INDEX_BYTES} is not read")
    return JsonStream(uri, lambda offset, length: inputs.fetch(index.object, offset, length), size)


@dataclass(frozen=True, slots=True)
class JsonRecord:
    """A JSON object with checked access to its fields."""

    where: str
    value: Any

    def take(self, name: str, kind: type) -> Any:
        """Return a field of a type; integers may not be negative. Raises CorruptData naming it."""
        found = self.value.get(name) if isinstance(self.value, dict) else None
        negative = isinstance(found, int) and found < 0
        if not isinstance(found, kind) or isinstance(found, bool) or negative:
            raise CorruptData(f"{self.where}: field {name!r} is missing or no {kind.__name__}")
        return found

    def record(self, name: str) -> JsonRecord:
        """Return a nested object."""
        return JsonRecord(f"{self.where}.{name}", self.take(name, dict))
