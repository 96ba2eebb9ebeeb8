"""Lists the objects of a dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from cachesvc.catalog.compiler import ListedObject
from cachesvc.catalog.containers import Container
from cachesvc.catalog.manifests import Manifests, marked
from cachesvc.core.errors import InvalidInput, NotFound
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.ignored import is_ignored, litter_name
from cachesvc.sources.source import Source

BESIDE = ".cachesvc-catalog.lmdb"
"""Name of a built catalog that was left beside the data."""
_ZARR = (".zarray", ".zgroup", ".zattrs", ".zmetadata", "zarr.json")
"""Files of a Zarr array or group."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Every object below the URIs, each once, in listing order.

    `beside` is a catalog left with them, if there is one. `below` lists the objects' URIs below each URI. `zarrs` are the
    URIs of folders that hold Zarr arrays. `manifests` tell the objects that a manifest is about. `litter` are names of
    files and folders that operating systems and tools left.
    """

    entries: list[ListedObject]
    beside: ObjectVersion | None
    below: list[list[str]]
    zarrs: frozenset[str]
    manifests: Manifests
    litter: tuple[str, ...] = ()


def listing(uris: Sequence[str], sources: Callable[[str], Source]) -> Listing:
    """List the objects below each URI, without the paths that `is_ignored` matches unless a URI names them exactly.

    Raises NotFound where nothing is left below one of the URIs.
    """
    entries: dict[str, ListedObject] = {}
    zarrs: set[str] = set()
    manifests: dict[str, Container] = {}
    litter: set[str] = set()
    beside, below = None, []
    for uri in uris:
        root, found_uris = uri.rstrip("/"), []
        for version in sources(uri).list(uri):
            path = version.uri[len(root) + 1 :] if version.uri.startswith(root + "/") else ""
            path = path or version.uri.rpartition("/")[2]
            if version.uri.startswith(("http://", "https://")):
                path = urlsplit(version.uri).path.rpartition("/")[2]
            if version.uri.endswith(_ZARR) and version.uri.rpartition("/")[2] in _ZARR:
                zarrs.add(version.uri.rpartition("/")[0])
            if version.uri != root and (mark := marked(path)):
                manifests[version.uri.removesuffix(path[len(mark[0]) :].lstrip("/")).rstrip("/")] = mark[1]
            if path == BESIDE and len(uris) == 1:
                beside = version
            if version.uri == root or not is_ignored(path):
                entries.setdefault(version.uri, ListedObject(version, path, version.uri == root))
                found_uris.append(version.uri)
            else:
                litter.add(litter_name(path))
        below.append(found_uris)
    absent = [uri for uri, found_uris in zip(uris, below, strict=True) if not found_uris]
    if absent:
        braces = "; braces are a range like {000..123} or a list like {a,b}" if "{" in absent[0] else ""
        raise NotFound(
            f"{name_of(absent)} holds no data: check the prefix and the credentials' view of it{braces}"
        )
    return Listing(
        list(entries.values()),
        beside,
        below,
        frozenset(zarrs),
        Manifests(manifests),
        tuple(sorted(filter(None, litter))),
    )


def check_all_chosen(
    uris: Sequence[str], listed: Listing, chosen: Sequence[ListedObject], format: str
) -> None:
    """Raise InvalidInput where the format leaves out every object below one of several folders or prefixes.

    URIs of single objects, such as a glob expands to, may be left out.
    """
    taken = {entry.object.uri for entry in chosen}
    for uri, found_uris in zip(uris, listed.below, strict=True):
        if found_uris != [uri] and taken.isdisjoint(found_uris):
            raise InvalidInput(
                f"{uri} holds no {format} data, unlike the other URIs: open it apart and mix() them, or give format="
            )


def name_of(uris: Sequence[str]) -> str:
    """Return a name for the URIs that is short enough for one line."""
    return uris[0] if len(uris) == 1 else f"{uris[0]} and {len(uris) - 1} more"
