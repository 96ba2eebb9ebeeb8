"""The extents that this process leases: mapped at their catalog addresses, or open as files."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.holes import Holes
from cachesvc.core.model import PAGE_BYTES
from loader.reading.active_reads import Ints
from loader.reading.address_range import AddressRange

ORIGINS = ("ram", "nvme", "direct", "local", "prepared")
"""The places that read bytes come from; the last are prepared samples that this process made for itself."""
MAPPABLE = frozenset({"ram", "direct"})
"""Origins in sealed or private memory: a mapping of it cannot fault on a disk."""
MAX_FILES = 256
"""Descriptors held open for files; the usual limit of a process is 1,024."""


class HeldExtent:
    """A leased extent; `fd` is -1 once it is mapped."""

    __slots__ = ("content", "digests", "fd", "holes", "offset", "origin", "size_bytes")

    def __init__(self, granted: Granted, holes: Holes | None) -> None:
        self.fd, self.offset, self.size_bytes = granted.fd, granted.offset, granted.size_bytes
        self.origin = ORIGINS.index(granted.origin)
        self.content = granted.content
        self.digests: bytes | None = None
        self.holes = holes


class HeldExtents:
    """The leased extents by index, least recently used first. The caller holds the lock of `Leases`."""

    def __init__(self, catalog: Catalog, limit_bytes: int) -> None:
        """`limit_bytes`: at most so much is mapped."""
        self.range = AddressRange(catalog.space_bytes)
        self.by_index: OrderedDict[int, HeldExtent] = OrderedDict()
        self.mapped = np.zeros(len(catalog.extent_starts), bool)
        """By index: whether the extent is mapped."""
        self.files = 0
        """Extents held as open descriptors."""
        count = len(catalog.extent_starts)
        self.file_of, self.offset_in_file = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        """By index: the descriptor of the extent if it is a file without holes, else -1, and where in it the extent
        begins."""
        self.before_unmapping: Callable[[int], None] = lambda _: None
        """Called with each extent that is about to be unmapped."""
        self._catalog, self._limit_bytes = catalog, limit_bytes
        self._starts, self._sizes = catalog.extent_starts, catalog.extent_sizes
        self._mapped_bytes, self._unmapped = 0, len(self._starts)
        self._origin_bytes = dict.fromkeys(ORIGINS, 0)
        self._one_origin: int | None = None

    def all_mapped(self, first: Ints, last: Ints) -> bool:
        """True if ranges over these extents are mapped; False for a range that spans three extents or more."""
        mapped = self.mapped
        if not self._unmapped and last is first:  # 2 us less a batch
            return True
        return bool(
            mapped[first].all() and (last is first or (mapped[last].all() and (last - first <= 1).all()))
        )

    def missing(self, extents: Collection[int]) -> list[int]:
        """The extents that are not held; the others count as used now."""
        missing = []
        for extent in extents:
            if extent in self.by_index:
                self.by_index.move_to_end(extent)
            else:
                missing.append(extent)
        return missing

    def add(self, granted: Granted) -> None:
        """Enter a grant as an open descriptor."""
        holes = Holes(self._catalog.extent(granted.extent), granted.holes) if granted.holes else None
        held = HeldExtent(granted, holes)
        self.by_index[granted.extent] = held
        origins = {entry.origin for entry in (held, *self._one_of_each_origin())}
        self._one_origin = held.origin if len(origins) == 1 else None

    def map(self, extent: int) -> None:
        """Map an extent that was added just now, unless it is a file, has holes, or exceeds the limit."""
        held = self.by_index[extent]
        if ORIGINS[held.origin] in MAPPABLE and held.holes is None and self._map(extent, held):
            self._mapped_bytes += held.size_bytes
            self._unmapped -= 1
            # Close at once: after an interrupt in between, the number could be another file's.
            self.mapped[extent], fd, held.fd = True, held.fd, -1
            os.close(fd)
        else:
            self.files += 1
            if held.holes is None:
                self.file_of[extent], self.offset_in_file[extent] = held.fd, held.offset

    def remove(self, extent: int) -> None:
        """Unmap or close an extent that no read needs."""
        held = self.by_index.pop(extent)
        if held.fd >= 0:
            self.file_of[extent] = -1
            os.close(held.fd)
            self.files -= 1
        else:
            self.before_unmapping(extent)
            self.mapped[extent] = False
            self._unmapped += 1
            self.range.unmap(int(self._starts[extent]), held.size_bytes)
            self._mapped_bytes -= held.size_bytes

    def excess(self, coming: Collection[int]) -> tuple[int, int]:
        """The mapped bytes and open files beyond the limits, if these extents were held, too."""
        coming_bytes = int(self._sizes[list(coming)].sum())
        return self._mapped_bytes + coming_bytes - self._limit_bytes, self.files + len(coming) - MAX_FILES

    def least_recently_used(self, excess_bytes: int, excess_files: int, needed: Collection[int]) -> list[int]:
        """Extents whose removal makes up for the excess, none of them `needed`."""
        found = []
        for extent, held in self.by_index.items():
            if extent in needed:
                continue
            if held.fd < 0 and excess_bytes > 0:
                excess_bytes -= held.size_bytes
                found.append(extent)
            elif held.fd >= 0 and excess_files > 0:
                excess_files -= 1
                found.append(extent)
        return found

    def count_bytes(self, extents: Ints, size_bytes: int) -> None:
        """Attribute bytes to origins; exact while all held extents have one origin, else by share of ranges."""
        if self._one_origin is not None:
            self._origin_bytes[ORIGINS[self._one_origin]] += size_bytes
            return
        for extent, count in zip(*np.unique(extents, return_counts=True), strict=True):
            name = ORIGINS[self.by_index[int(extent)].origin]
            self._origin_bytes[name] += size_bytes * int(count) // len(extents)

    def count_origins(self, sizes: Iterable[tuple[int, int]]) -> None:
        """Attribute bytes to origins, given pairs of an index in ORIGINS and a size."""
        for origin, size_bytes in sizes:
            self._origin_bytes[ORIGINS[origin]] += size_bytes

    def origin_bytes(self) -> dict[str, int]:
        """Bytes read so far, by origin."""
        return dict(self._origin_bytes)

    def abandon(self) -> None:
        """Close inherited descriptors in a forked child; forget every extent and the address range."""
        for held in self.by_index.values():
            if held.fd >= 0:
                os.close(held.fd)
        self.file_of[:] = -1
        self.by_index.clear()
        self.range.forget()

    def _map(self, extent: int, held: HeldExtent) -> bool:
        """Map an extent; False where this process cannot, or may not, map so much."""
        fits = self._mapped_bytes + held.size_bytes <= self._limit_bytes
        if not fits or held.offset % PAGE_BYTES or not held.size_bytes:
            return False
        try:
            self.range.map(int(self._starts[extent]), held.size_bytes, held.fd, held.offset)
        except OutOfSpace:
            return False
        return True

    def _one_of_each_origin(self) -> list[HeldExtent]:
        """One extent while all held extents share an origin, else all of them."""
        if self._one_origin is None:
            return list(self.by_index.values())
        return [next(iter(self.by_index.values()))]
