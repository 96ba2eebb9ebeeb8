"""Extents -> bytes. Memory is mapped at its catalog address and gathered from; files are read with preadv.

No view of a mapping leaves this module (`array` excepted), and a mapping is replaced or removed only while no read
needs it: a gather runs without the interpreter lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Fixed
from cachesvc.client.protocol import Grants
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.limits import ACQUIRE_S
from cachesvc.core.order.intervals import Intervals
from cachesvc.system.fork_hooks import abandon_in_children
from loader.reading.active_reads import ActiveRead, Ints, touched
from loader.reading.address_range import Bytes
from loader.reading.changed_files import ChangedFiles
from loader.reading.file_reads import FileReads
from loader.reading.held_extents import ORIGINS
from loader.reading.lease_table import Leases

__all__ = ["ORIGINS", "ExtentReader", "Ints", "Records"]

Records = np.ndarray[Any, np.dtype[np.void]]

MAPPED_BYTES = 1 << 40
"""Mapping costs page tables (2 MiB a GiB), not memory: the tier holds the bytes once for all processes."""
_GLIBC_LARGEST_BYTES = (32 << 20) - (64 << 10)
"""Just below DEFAULT_MMAP_THRESHOLD_MAX of 64-bit glibc."""
CACHED_BYTES = 1 << 20
"""Items that are copied twice are copied in parts that stay in the processor's cache."""
MAX_GROUP = 64
"""Extents requested at once; a read that touches more proceeds in groups."""


class ExtentReader:
    """Reads one dataset through `Grants`. Safe to share between threads. A forked child makes its own."""

    def __init__(
        self,
        catalog: Catalog,
        grants: Grants,
        mapped_bytes: int = MAPPED_BYTES,
        timeout_s: float = ACQUIRE_S,
        suspect: Callable[[Sequence[int]], None] = lambda _: None,
        verify: bool = False,
    ) -> None:
        """`timeout_s`: how long one read may wait for its extents. `suspect` is called with extents whose cached copies
        cannot be read, or are wrong. `verify`: compare reads of cached files with their checksums."""
        _keep_freed_memory()
        self._catalog = catalog
        self._extents = Intervals(catalog.extent_starts)
        self._starts, self._ends = catalog.extent_starts, catalog.extent_starts + catalog.extent_sizes
        self._leases = Leases(catalog, grants, mapped_bytes, timeout_s)
        self._held = self._leases.held
        self.wait_clock = self._leases.wait_clock
        self.release_unused_mappings = self._leases.release_unused_mappings
        self.release_when_unused = self._leases.release_when_unused
        self.origin_bytes = self._held.origin_bytes
        self._changed_files = ChangedFiles(catalog, self._leases)
        self._files = FileReads(catalog, self._leases, self._changed_files, timeout_s, suspect, verify)
        self.expect = self._files.expect
        self._records = self._record_view()
        self._open = True
        abandon_in_children(self)

    # ---- for callers

    def spans(self, addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """The first and the last extent that each byte range touches; for an empty range, the extent of its address."""
        first = self._extents.of(addresses)
        ends = addresses + lengths
        if (ends <= self._ends[first]).all():
            return first, first
        return first, np.maximum(first, self._extents.of(ends - 1))

    def gather(
        self, slots: Ints, first: Ints, last: Ints, empty: Callable[[int], Bytes] | None = None
    ) -> Records:
        """Records of a Fixed layout, one opaque item each; `first`, `last` are their `spans`. The result is new memory,
        or what `empty` returns for a size in bytes.

        Raises what `Grants.acquire` raises, and TierFailed when a file cannot be read.
        """
        read_bytes = 0
        read, ready = self._leases.begin(first, last)
        try:
            if not ready:
                layout = self._catalog.layout
                assert isinstance(layout, Fixed), "only records of one size can be gathered"
                out = self._empty_records(len(slots), empty)
                return self._items_mixed(read, slots * layout.stride_bytes, out)
            if empty is None:
                out = self._records[slots]
            elif self._records.flags.c_contiguous:
                out = np.take(self._records, slots, out=self._empty_records(len(slots), empty), mode="clip")
            else:  # `take` would first copy all overlapping records
                out = self._empty_records(len(slots), empty)
                out[:] = self._records[slots]
            read_bytes = out.nbytes
            return out
        finally:
            self._leases.end(read, read_bytes)

    @contextmanager
    def holding(self, first: Ints, last: Ints, size_bytes: int) -> Iterator[bool]:
        """Keep the extents of ranges mapped meanwhile, for a device that reads `size_bytes` out of them. Yields False,
        and counts no bytes, when one is not mapped: a gather leases it."""
        read, ready = self._leases.begin(first, last)
        try:
            yield ready
        finally:
            self._leases.end(read, size_bytes if ready else 0)

    @property
    def space(self) -> tuple[int, int]:
        """The address and the size in bytes of the memory in which extents are mapped."""
        return self._held.range.address, int(self._ends.max(initial=0))

    def place_of(self, extent: int) -> tuple[int, int]:
        """The address at which an extent is mapped, if it is, and its size in bytes."""
        start = int(self._starts[extent])
        return self._held.range.address + start, int(self._ends[extent]) - start

    def before_unmapping(self, call: Callable[[int], None]) -> None:
        """Call with each mapped extent before it is unmapped, while no read needs it. The call must be quick."""
        self._held.before_unmapping = call

    def join(
        self,
        addresses: Ints,
        ends: Ints,
        first: Ints,
        last: Ints,
        empty: Callable[[int], Bytes] | None = None,
    ) -> Bytes:
        """Ranges of bytes, concatenated; `first`, `last` are their `spans`. The result is new memory, or what `empty`
        returns for a size in bytes. Raises as `gather`."""
        memory = self._held.range.memory
        read_bytes = 0
        read, ready = self._leases.begin(first, last)
        try:
            if not ready:
                return self._join_mixed(read, addresses, ends, empty)
            views = [memory[at:end] for at, end in zip(addresses.tolist(), ends.tolist(), strict=True)]
            if empty is None:
                out = np.frombuffer(bytearray().join(views), np.uint8)
                read_bytes = len(out)
                return out
            lengths = ends - addresses
            out = empty(int(lengths.sum()))
            for into, view in zip(_parts(out, lengths), views, strict=True):
                into[:] = view
            read_bytes = len(out)
            return out
        finally:
            self._leases.end(read, read_bytes)

    def items(
        self, addresses: Ints, width: int, first: Ints, empty: Callable[[int], Bytes] | None = None
    ) -> Bytes:
        """Items of `width` bytes that lie in one extent each, `first`, concatenated in new memory, or in what `empty`
        returns for a size in bytes. Raises as `gather`."""
        read_bytes, count = 0, len(addresses)
        read, ready = self._leases.begin(first, first)
        try:
            if ready and empty is None:
                read_bytes = count * width
                return _items(self._held.range.array, width)[addresses].view(np.uint8)
            out = np.empty(count, f"V{width}") if empty is None else empty(count * width).view(f"V{width}")
            if not ready:
                return self._items_mixed(read, addresses, out).view(np.uint8)
            read_bytes, view, step = (
                count * width,
                _items(self._held.range.array, width),
                max(1, CACHED_BYTES // width),
            )
            for at in range(0, count, step):  # `take` would first copy all overlapping items
                out[at : at + step] = view[addresses[at : at + step]]
            return out.view(np.uint8)
        finally:
            self._leases.end(read, read_bytes)

    def read(self, addresses: Ints, lengths: Ints) -> list[bytes | None]:
        """The bytes of each range, in order; None where the length is negative (an absent field). Raises as `gather`."""
        full = lengths > 0
        if full.all():
            return self._read_all(addresses, lengths)
        out: list[bytes | None] = [None if n < 0 else b"" for n in lengths.tolist()]
        if full.any():
            found = self._read_all(addresses[full], lengths[full])
            for at, raw in zip(np.flatnonzero(full).tolist(), found, strict=True):
                out[at] = raw
        return out

    @property
    def reads_ahead(self) -> bool:
        """Whether `expect` has an effect: extents are held as files, and their bytes come from the disk."""
        return self._held.files > 0 and self._files.reads_ahead

    def array(self) -> Bytes:
        """The whole address space as one flat read-only array, every extent mapped until `close`.

        Raises OutOfSpace when an extent is not in memory (a file) or exceeds the mapping limit, and the error of an
        object that is missing.
        """
        if not self._leases.pinned:
            self._map_all()
        return self._held.range.array

    def count_prepared(self, size_bytes: int) -> None:
        """Count bytes of prepared samples that this process made, since no extent with them was there."""
        self._leases.count_origins([(ORIGINS.index("prepared"), size_bytes)])

    def close(self) -> None:
        """Release every extent. The caller has ended its reads."""
        if self._open:
            self._open = False
            del self._records
            self._leases.close()

    def close_unless_pinned(self) -> None:
        """Close after the last reference is gone, unless `array` gave a view away."""
        if not self._leases.pinned:
            self.close()

    def abandon(self) -> None:
        """Close inherited descriptors in a forked child, and send nothing."""
        self._open = False
        self._leases.abandon()

    # ---- reads

    def _map_all(self) -> None:
        leases, count = self._leases, len(self._starts)
        with leases.holding_all():
            for at in range(0, count, MAX_GROUP):
                extents = np.arange(at, min(at + MAX_GROUP, count))
                read, _ = leases.begin(extents, extents)
                try:
                    leases.ensure(read, extents.tolist())
                    self._files.check_holes(read)
                finally:
                    leases.end(read)
                if not self._held.mapped[extents].all():
                    break
        if not leases.pinned:
            raise OutOfSpace(
                f"the {count} extents are not all in a daemon's memory: start one whose --ram holds them, "
                "or read by sample"
            )

    def _record_view(self) -> Records:
        layout, flat = self._catalog.layout, self._held.range.array
        if not isinstance(layout, Fixed):
            return np.empty(0, "V1")
        return _items(flat, layout.record_bytes, layout.stride_bytes)

    def _empty_records(self, count: int, empty: Callable[[int], Bytes] | None) -> Records:
        layout = self._catalog.layout
        assert isinstance(layout, Fixed), "only records of one size can be gathered"
        kind = f"V{layout.record_bytes}"
        return np.empty(count, kind) if empty is None else empty(count * layout.record_bytes).view(kind)

    def _held_parts(self, read: ActiveRead) -> Iterator[tuple[Ints, Ints, Ints]]:
        """Split ranges by extent into parts, and yield each part (indices of ranges) once its extents are held, with those
        that can be read from the mapping and the others. A part has at most `MAX_GROUP` extents, down to those of one range
        when room is refused. Raises OutOfSpace when one does not fit."""
        if self._held.files:
            self._changed_files.release_changed()
        first, last = read.first, read.last
        waiting = [np.arange(len(first))]
        while waiting:
            part = waiting.pop()
            begins = first[part]
            ends = begins if last is first else last[part]
            needed = touched(begins, ends)
            if len(needed) > MAX_GROUP or not self._leases.ensure(read, needed):
                if len(part) > 1:
                    part, half = part[np.argsort(begins, kind="stable")], len(part) // 2
                    waiting += [part[half:], part[:half]]
                    continue
                self._leases.await_room(read, needed)
            mapped = self._held.mapped[begins]
            if ends is not begins:  # one that spans three extents or more is not read from the mapping
                mapped = mapped & self._held.mapped[ends] & (ends - begins <= 1)
            yield part, part[mapped], part[~mapped]

    def _items_mixed(self, read: ActiveRead, addresses: Ints, out: Records) -> Records:
        """Set `out` to the items at these addresses, some of which are in files."""
        size, memory = out.dtype.itemsize, out.view(np.uint8)
        mapped_items = _items(self._held.range.array, size)
        for part, mapped, others in self._held_parts(read):
            out[mapped] = mapped_items[addresses[mapped]]
            self._leases.count(read.first[part], len(part) * size)
            lengths = np.full(len(others), size)
            places = others * size
            self._files.read_into(read, addresses[others], lengths, read.first[others], memory, places)
        return out

    def _join_mixed(
        self, read: ActiveRead, addresses: Ints, ends: Ints, empty: Callable[[int], Bytes] | None
    ) -> Bytes:
        lengths, memory = ends - addresses, self._held.range.memory
        size = int(lengths.sum())
        out = np.empty(size, np.uint8) if empty is None else empty(size)
        places, into = np.cumsum(lengths) - lengths, out.data
        for part, mapped, others in self._held_parts(read):
            others = others[lengths[others] > 0]
            for at, size, address in zip(
                places[mapped].tolist(), lengths[mapped].tolist(), addresses[mapped].tolist(), strict=True
            ):
                into[at : at + size] = memory[address : address + size]
            self._leases.count(read.first[part], int(lengths[part].sum()))
            self._files.read_into(
                read, addresses[others], lengths[others], read.first[others], out, places[others]
            )
        return out

    def _read_all(self, addresses: Ints, lengths: Ints) -> list[bytes | None]:
        """Ranges of at least one byte; one copy each."""
        first, last = self.spans(addresses, lengths)
        ends = addresses + lengths
        memory = self._held.range.memory
        read_bytes = 0
        read, ready = self._leases.begin(first, last)
        try:
            if ready:
                read_bytes = int(lengths.sum())
                return [
                    bytes(memory[at:end]) for at, end in zip(addresses.tolist(), ends.tolist(), strict=True)
                ]
            out: list[bytes | None] = [None] * len(first)
            for _, mapped, others in self._held_parts(read):
                for at in mapped.tolist():
                    out[at] = bytes(memory[addresses[at] : ends[at]])
                self._leases.count(first[mapped], int(lengths[mapped].sum()))
                self._files.read(others, read, addresses, lengths, out)
            return out
        finally:
            self._leases.end(read, read_bytes)


@lru_cache(maxsize=1)
def _keep_freed_memory() -> None:
    """Keep the C library from returning the memory of batches to the kernel, which would fault it in again page by page.

    When a mapped block is freed, glibc (mallopt(3), M_MMAP_THRESHOLD) serves such sizes from its heap from then on and
    keeps twice as much of it, as in any program that frees one large array. The block is not written to, so it costs no
    memory. Measured: batches of 64 x 110 KB are copied 1.4-1.7 times as fast.
    """
    np.empty(_GLIBC_LARGEST_BYTES, np.uint8)


def _items(memory: Bytes, width: int, stride: int = 1) -> Records:
    """Every item of `width` bytes as one opaque value: numpy gathers those as fast as rows, overlapping ones too."""
    count = max(0, (memory.size - width) // stride + 1)
    view: Records = np.ndarray((count,), f"V{width}", memory, 0, (stride,))
    return view


def _parts(memory: Bytes, sizes: Ints) -> list[memoryview]:
    """Memory in consecutive parts of these sizes."""
    bounds = [0, *np.cumsum(sizes).tolist()]
    return [memory.data[low:high] for low, high in itertools.pairwise(bounds)]
