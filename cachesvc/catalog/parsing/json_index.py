"""Reads the `index.json` of MDS and litData: finds it among the objects, and checks the types of its fields."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cachesvc.catalog.compiler import Inputs, ListedObject
from cachesvc.catalog.parsing.json_stream import JsonStream
from cachesvc.core.errors import CorruptData, InvalidInput

_INDEX_BYTES = 512 << 20
"""Limit of an index, about a million shards. It is parsed in windows (`json_stream.py`)."""


def indices(inputs: Inputs, tool: str, merges: bool = False) -> list[ListedObject]:
    """Return the index of each URI: the one directly below it, which may list its subfolders' shards, else its only one.

    With `merges`, several indices of subfolders are one dataset, as Streaming's `merge_index` makes it; the outermost ones
    count. Raises InvalidInput where there is none, or several that are no parts of one dataset.
    """
    below: dict[str, list[ListedObject]] = {}
    for entry in inputs.entries:
        if entry.name == "index.json":
            below.setdefault(entry.object.uri.removesuffix(entry.path), []).append(entry)
    if not below:
        raise InvalidInput(f"{inputs.uri} has {tool} shards but no index.json")
    chosen = []
    for root, found in below.items():
        outermost = _outermost(found)
        if len(outermost) > 1 and not merges:
            paths = ", ".join(entry.path for entry in outermost[:4])
            raise InvalidInput(
                f"{root} holds {len(outermost)} {tool} datasets ({paths}): open one of them, or a list of them"
            )
        chosen += outermost
    return chosen


def _outermost(found: Sequence[ListedObject]) -> list[ListedObject]:
    """Leave out indices below the folder of another one: a merged index lists the shards of subfolders itself."""
    folders = {entry.path.removesuffix("index.json") for entry in found}

    def is_below(entry: ListedObject) -> bool:
        parts = entry.path.split("/")[:-1]
        above = ("".join(f"{part}/" for part in parts[:depth]) for depth in range(len(parts)))
        return any(folder in folders for folder in above)

    return [entry for entry in found if not is_below(entry)]


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
