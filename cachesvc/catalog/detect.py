"""Listing a dataset, and finding out what format it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachesvc.catalog.formats.webdataset import PACKED
from cachesvc.catalog.inputs import Entry, Options
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import Source
from cachesvc.sources.uri import no_data

FORMATS = ("files", "webdataset", "mds", "parquet", "records", "tokens")
BESIDE = ".cachesvc-catalog.lmdb"
"""A built catalog that was left beside the data."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Every object below the URIs, each once, in listing order, and the catalog beside them if there is one.
    `below`: the objects' URIs below each of the URIs."""

    entries: list[Entry]
    beside: ObjectVersion | None
    below: list[list[str]]


def listing(uris: Sequence[str], sources: Callable[[str], Source]) -> Listing:
    """Hidden files, folder markers and `_SUCCESS` are no data. Raises NotFound where nothing is left, of any URI."""
    entries: dict[str, Entry] = {}
    beside, below = None, []
    for uri in uris:
        root, mine = uri.rstrip("/"), []
        for found in sources(uri).list(uri):
            path = found.uri[len(root) + 1 :] if found.uri.startswith(root + "/") else ""
            path = path or found.uri.rpartition("/")[2]
            if path == BESIDE and len(uris) == 1:
                beside = found
            if not no_data(path):
                entries.setdefault(found.uri, Entry(found, path))
                mine.append(found.uri)
        below.append(mine)
    absent = [uri for uri, mine in zip(uris, below, strict=True) if not mine]
    if absent:
        raise NotFound(f"{name_of(absent)} holds no data: check the prefix and the credentials' view of it")
    return Listing(list(entries.values()), beside, below)


def check_all_chosen(uris: Sequence[str], listed: Listing, chosen: Sequence[Entry], format: str) -> None:
    """Raises InvalidInput for a URI of several whose objects the format leaves out."""
    taken = {entry.object.uri for entry in chosen}
    for uri, mine in zip(uris, listed.below, strict=True):
        if taken.isdisjoint(mine):
            raise InvalidInput(
                f"{uri} holds no {format} data, unlike the other URIs: open it apart, mix() what was opened, or say format="
            )


def name_of(uris: Sequence[str]) -> str:
    """The URIs, short enough for one line."""
    return uris[0] if len(uris) == 1 else f"{uris[0]} and {len(uris) - 1} more"


def format_of(uri: str, entries: Sequence[Entry], options: Options) -> str:
    """The format's name: as asked, or by the names of the files. Raises InvalidInput where it is unknown or
    two formats fit."""
    if options.format:
        if options.format not in FORMATS:
            raise InvalidInput(f"unknown format {options.format!r}; there are: {', '.join(FORMATS)}")
        return options.format
    names = [entry.name for entry in entries]
    arrays = any(name.endswith((".bin", ".npy")) for name in names)
    fits = {
        # nothing but an index: its shards are lost, which mds says
        "mds": any(name.endswith(".mds") or ".mds." in name for name in names)
        or set(names) == {"index.json"},
        "parquet": any(name.endswith(".parquet") for name in names),
        # nothing but compressed tars: webdataset says that they are not read
        "webdataset": any(name.endswith(".tar") for name in names)
        or all(name.endswith(PACKED) for name in names),
        "tokens": arrays and bool(options.seq_len or any(name.endswith(".idx") for name in names)),
        "records": arrays and bool(options.record_bytes or all(name.endswith(".npy") for name in names)),
    }
    fits["records"] = fits["records"] or (arrays and bool(options.dtype) and not fits["tokens"])
    found = [name for name, fit in fits.items() if fit]
    if len(found) > 1:
        raise InvalidInput(f"{uri} could be {' or '.join(found)}: say format=... ({', '.join(FORMATS)})")
    return found[0] if found else "files"
