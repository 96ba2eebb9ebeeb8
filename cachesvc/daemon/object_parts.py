"""Parts of objects that are read without a dataset: where they lie, and how they are fetched."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import msgspec

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.object_ranges import range_of
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import DatasetId, Extent, ExtentId, ObjectVersion, Piece, extent_of
from cachesvc.core.tiering.copies import UNDECLARED
from cachesvc.daemon.access.tenants import Peer, admits
from cachesvc.daemon.datasets import Datasets, SealedCatalog, ServedDataset


@dataclass(frozen=True, slots=True)
class ObjectPart:
    """The bytes [begin, end) of an object version, at offset `at` of an extent."""

    extent: ExtentId
    extent_bytes: int
    begin: int
    end: int
    at: int
    alone: Extent | None = None
    """The extent of this part alone, where no dataset has the bytes."""


MAX_SHARING = 8
"""The most datasets whose extents a file is looked for in."""


def sharing(datasets: Datasets, opened: ServedDataset, peer: Peer | None) -> list[DatasetId]:
    """Return the datasets in use that a user may read, and whose extents may hold bytes of the objects of `opened`.
    O(datasets). Runs on the loop's thread."""
    prefix, found = opened.catalog.uri_prefix, list[DatasetId]()
    for each in _in_use(datasets):
        other = each.catalog.uri_prefix
        near = prefix.startswith(other) or other.startswith(prefix)
        if near and each.catalog.format != opened.catalog.format and admits(each.rules, peer):
            found.append(each.id)
    return found[:MAX_SHARING]


def _in_use(datasets: Datasets) -> Iterator[ServedDataset]:
    """Yield the claimed datasets that the source has, the most recently used first."""
    for each in reversed(datasets.all()):
        if each.source is None and datasets.claimed(each):
            yield each


class ObjectParts:
    """The extents that hold parts of objects: those of an open dataset, or one of the part alone. Runs on the loop's
    thread."""

    def __init__(self, datasets: Datasets, part_bytes: int) -> None:
        self._datasets, self._part_bytes = datasets, part_bytes
        datasets.undeclared = self.home
        self._waiting: Counter[ExtentId] = Counter()
        self._extents: dict[ExtentId, Extent] = {}

    def find(self, version: ObjectVersion, offset: int) -> ObjectPart:
        """Return the part that holds a byte of an object. Raises InvalidInput for a byte beyond its end."""
        if not 0 <= offset < version.size_bytes:
            raise InvalidInput(f"{version.uri} has no byte {offset:,}: it has {version.size_bytes:,} bytes")
        for dataset in _in_use(self._datasets):
            if (found := range_of(dataset.catalog, version, offset)) is not None:
                index = found.extent
                held, size_bytes = dataset.extent_ids[index], dataset.sizes[index]
                return ObjectPart(held, size_bytes, found.begin, found.end, found.at)
        begin = offset // self._part_bytes * self._part_bytes
        size_bytes = min(self._part_bytes, version.size_bytes - begin)
        extent = extent_of([Piece(version, begin, size_bytes)])
        return ObjectPart(extent.id, size_bytes, begin, begin + size_bytes, 0, extent)

    def wait(self, part: ObjectPart) -> None:
        """Keep what a fill of the part needs, until `answered`."""
        if part.alone is not None:
            self._waiting[part.extent] += 1
            self._extents[part.extent] = part.alone

    def answered(self, part: ObjectPart) -> None:
        """End one `wait`."""
        if part.alone is not None:
            self._waiting[part.extent] -= 1
            if not self._waiting[part.extent]:
                del self._waiting[part.extent], self._extents[part.extent]

    def home(self, extent: ExtentId) -> tuple[ServedDataset, int] | None:
        """Return what stands for a dataset of an extent that a reader waits for, and 0; None for any other extent."""
        found = self._extents.get(extent)
        if found is None:
            return None
        catalog = PartCatalog(found)
        sealed, sizes = SealedCatalog(catalog.sealed()), (found.size_bytes,)
        served = ServedDataset(
            id=UNDECLARED,
            catalog=cast("Catalog", catalog),
            sealed=sealed,
            extent_ids=(extent,),
            sizes=sizes,
            extents=((extent, found.size_bytes),),
            index_of={extent: 0},
            rules=frozenset(),
        )
        return served, 0


class PartCatalog:
    """A catalog of the one extent of a part, as far as fills read it."""

    format = ""
    layout = None
    compressed = False

    def __init__(self, part: Extent) -> None:
        self._part = part
        self.uri = part.pieces[0].object.uri

    def extent(self, index: int) -> Extent:
        """Return the extent."""
        assert index == 0, "a part is one extent"
        return self._part

    def sealed(self) -> int:
        """Return a descriptor of a memfd from which `read_part` makes this again. Raises OSError."""
        (piece,) = self._part.pieces
        version = piece.object
        body = msgspec.msgpack.encode(
            (version.uri, version.size_bytes, version.etag, piece.offset, piece.length)
        )
        memory = os.memfd_create("cachesvc-part", os.MFD_CLOEXEC)
        os.pwrite(memory, body, 0)
        return memory


def read_part(fd: int) -> Catalog:
    """Return the catalog of a part that `PartCatalog.sealed` described."""
    body = os.pread(fd, os.fstat(fd).st_size, 0)
    uri, size_bytes, etag, offset, length = msgspec.msgpack.decode(body, type=tuple[str, int, str, int, int])
    extent = extent_of([Piece(ObjectVersion(uri, size_bytes, etag), offset, length)])
    return cast("Catalog", PartCatalog(extent))
