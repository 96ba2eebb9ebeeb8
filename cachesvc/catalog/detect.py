"""Listing a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.catalog.inputs import Entry
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.ignored import is_ignored
from cachesvc.sources.source import Source

BESIDE = ".cachesvc-catalog.lmdb"
"""A built catalog that was left beside the data."""
_ZARR = (".zarray", ".zgroup", ".zattrs", ".zmetadata", "zarr.json")
"""Files that a Zarr array or group has."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Every object below the URIs, each once, in listing order, and the catalog beside them if there is one.
    `below`: the objects' URIs below each of the URIs. `zarrs`: URIs of the folders that hold Zarr arrays."""

    entries: list[Entry]
    beside: ObjectVersion | None
    below: list[list[str]]
    zarrs: frozenset[str]


def listing(uris: Sequence[str], sources: Callable[[str], Source]) -> Listing:
    """Leave out the objects whose path `is_ignored` names. Raises NotFound where nothing is left, of any URI."""
    entries: dict[str, Entry] = {}
    zarrs: set[str] = set()
    beside, below = None, []
    for uri in uris:
        root, mine = uri.rstrip("/"), []
        for found in sources(uri).list(uri):
            path = found.uri[len(root) + 1 :] if found.uri.startswith(root + "/") else ""
            path = path or found.uri.rpartition("/")[2]
            if found.uri.endswith(_ZARR) and found.uri.rpartition("/")[2] in _ZARR:
                zarrs.add(found.uri.rpartition("/")[0])
            if path == BESIDE and len(uris) == 1:
                beside = found
            if not is_ignored(path):
                entries.setdefault(found.uri, Entry(found, path))
                mine.append(found.uri)
        below.append(mine)
    absent = [uri for uri, mine in zip(uris, below, strict=True) if not mine]
    if absent:
        raise NotFound(f"{name_of(absent)} holds no data: check the prefix and the credentials' view of it")
    return Listing(list(entries.values()), beside, below, frozenset(zarrs))


def check_all_chosen(uris: Sequence[str], listed: Listing, chosen: Sequence[Entry], format: str) -> None:
    """Raises InvalidInput for a folder or prefix of several whose objects the format leaves out. Single objects, such
    as a glob stands for, are left out like those of one folder."""
    taken = {entry.object.uri for entry in chosen}
    for uri, mine in zip(uris, listed.below, strict=True):
        if mine != [uri] and taken.isdisjoint(mine):
            raise InvalidInput(
                f"{uri} holds no {format} data, unlike the other URIs: open it apart, mix() what was opened, or say format="
            )


def name_of(uris: Sequence[str]) -> str:
    """The URIs, short enough for one line."""
    return uris[0] if len(uris) == 1 else f"{uris[0]} and {len(uris) - 1} more"
