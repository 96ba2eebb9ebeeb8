"""The interface of a format's compiler: `Inputs` go in, a `Draft` comes out."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from cachesvc.catalog.address_space import AddressSpace
from cachesvc.catalog.columns import Array, Ints, TextColumn
from cachesvc.catalog.layout import Field
from cachesvc.catalog.options import Options
from cachesvc.core.model import Extent, ObjectVersion

THREADS = 32
_T = TypeVar("_T")
_R = TypeVar("_R")
_SEPARATORS = re.compile(r"[-._\s\d]+")


class ExtentBytes(Protocol):
    """Reads data for formats that carry no index (tar) through the cache, so that no byte is fetched twice."""

    def declare(self, extents: Sequence[Extent]) -> None:
        """Name the extents that `read` refers to, in address order. Called once, before the first `read`."""
        ...

    def read(self, extent: int, offset: int, length: int) -> bytes:
        """Return exactly `length` bytes of an extent. Calls come in ascending order of extents."""
        ...


@dataclass(frozen=True, slots=True)
class ListedObject:
    """A listed object and its path below the URI that was opened. `named`: the URI, or a glob, names the object itself."""

    object: ObjectVersion
    path: str
    named: bool = False

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self.path.rpartition("/")[2]

    @property
    def extension(self) -> str:
        """The extension of the name in lower case, "" for none."""
        return split_name(self.name)[1].lower()


def split_name(path: str) -> tuple[str, str]:
    """Split a path into stem and extension. Names like `.hidden` and `name.` have no extension."""
    folder, slash, name = path.rpartition("/")
    stem, _, extension = name.rpartition(".")
    return (folder + slash + stem, extension) if stem and extension else (path, "")


def words_of(name: str) -> list[str]:
    """Return the words of a name in lower case, without numbers and separators."""
    return [word for word in _SEPARATORS.split(name.lower()) if word]


def paths_of(entries: Sequence[ListedObject]) -> list[str]:
    """Return paths below the URI; where several URIs hold the same path, below their common folder."""
    paths = [entry.path for entry in entries]
    if len(set(paths)) == len(paths):
        return paths
    uris = [entry.object.uri for entry in entries]
    common = os.path.commonprefix(uris).rpartition("/")[0]  # noqa: RUF071
    return [uri[len(common) + 1 :] for uri in uris]


def names_of(entries: Sequence[ListedObject]) -> list[str]:
    """Return the name of each object; its path where several have that name."""
    names = [entry.name for entry in entries]
    count = Counter(names)
    if len(count) == len(names):
        return names
    return [path if count[name] > 1 else name for name, path in zip(names, paths_of(entries), strict=True)]


@dataclass(frozen=True, slots=True)
class Inputs:
    """One dataset to compile.

    `fetch(object, offset, length)` reads headers and sidecars; what a compiler must read whole, it reads from `data`.
    `progress(done, total)` counts what the format indexes one after the other: objects, or bytes.
    `unrelated` are entries whose content is not of the format.
    `found_out`: the format was inferred, not given.
    """

    uri: str
    entries: Sequence[ListedObject]
    options: Options
    fetch: Callable[[ObjectVersion, int, int], bytes]
    data: ExtentBytes
    progress: Callable[[int, int], None]
    unrelated: frozenset[int] = frozenset()
    found_out: bool = False


def in_threads(call: Callable[[_T], _R], items: Iterable[_T]) -> Iterator[_R]:
    """Yield what a call for each item returns, in their order. Many calls run at once, each a request to the source."""
    with ThreadPoolExecutor(THREADS, "compile") as pool:
        yield from pool.map(call, items)


@dataclass(slots=True)
class Draft:
    """A compiled dataset that is not written yet.

    `head` and `columns` belong to the layout `kind` (`layout.py`). `extent_first[i]` is the first sample of extent i, and
    the last value the number of samples. `notes` name the data that was left out, except the entries
    `unrelated`. Labels are the column `label` with `classes`, or the column `label.number`. With `label_width`, each sample
    has that many numbers, or in `label.set` 1 for each class that applies.
    """

    kind: str
    space: AddressSpace
    fields: tuple[Field, ...]
    extent_first: Ints
    head: dict[str, Any] = field(default_factory=dict)
    columns: dict[str, Array] = field(default_factory=dict)
    keys: TextColumn | None = None
    classes: tuple[str, ...] = ()
    label_width: int = 0
    tags: dict[str, Array | tuple[Array, TextColumn]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    unrelated: Collection[int] = ()
