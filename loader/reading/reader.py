"""Extents -> bytes. Memory is mapped at its catalog address and gathered from; files are read with preadv.

No view of a mapping leaves this module (`array` excepted), and a mapping is replaced or removed only while no read
looks at it: a gather runs without the interpreter lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Fixed
from cachesvc.client.protocol import Grants
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.order.intervals import Intervals
from loader.process.fork_hooks import abandon_in_children
from loader.process.malloc import keep_freed_memory
from loader.reading.address_range import Bytes
from loader.reading.changed_files import ChangedFiles
from loader.reading.file_reads import FileReads
from loader.reading.lease_table import ORIGINS, Ints, Leases, Use, touched
from loader.reading.wait_for_room import wait_for_room

__all__ = ["ORIGINS", "ExtentReader", "Ints", "Records"]

Records = np.ndarray[Any, np.dtype[np.void]]

MAPPED_BYTES = 1 << 40
"""Mapping costs page tables (2 MiB a GiB), not memory: the tier holds the bytes once for everybody."""
ACQUIRE_TIMEOUT_S = 300.0
"""A cold extent behind a throttled source takes minutes at worst; past this somebody should know."""
MAX_GROUP = 64
"""Extents asked for at once; one read that touches more goes through them in groups."""


class ExtentReader:
    """Reads one dataset through `Grants`. Safe to share between threads. A forked child makes its own."""

    def __init__(
        self,
        catalog: Catalog,
        grants: Grants,
        mapped_bytes: int = MAPPED_BYTES,
        timeout_s: float = ACQUIRE_TIMEOUT_S,
        suspect: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`timeout_s`: how long one read may wait for its extents. With `suspect`, reads of cached files are
        checked, and it is told of extents whose bytes are wrong."""
        keep_freed_memory()
        self._catalog = catalog
        self._timeout_s = timeout_s
        self._extents = Intervals(catalog.extent_starts)
        self._starts, self._ends = catalog.extent_starts, catalog.extent_starts + catalog.extent_sizes
        self._leases = Leases(catalog, grants, mapped_bytes, timeout_s)
        self.stages = self._leases.stages
        self._lying = ChangedFiles(catalog, self._leases)
        self._far = FileReads(catalog, self._leases, self._lying, timeout_s, suspect)
        self._records = self._record_view()
        self._open = True
        abandon_in_children(self)

    # ---- what callers use

    def ease(self) -> None:
        """Give back what no read looks at just now."""
        self._leases.ease()

    def forgo(self, extents: Iterable[int]) -> None:
        """Read no more of what is held of these extents; see `Leases.forgo`."""
        self._leases.forgo(extents)

    def spans(self, addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """The first and the last extent that each byte range touches; of an empty one, where it lies."""
        first = self._extents.of(addresses)
        ends = addresses + lengths
        if (ends <= self._ends[first]).all():
            return first, first
        return first, np.maximum(first, self._extents.of(ends - 1))

    def gather(
        self, slots: Ints, first: Ints, last: Ints, empty: Callable[[int], Bytes] | None = None
    ) -> Records:
        """Records of a Fixed layout, one opaque item each; `first`, `last` are their `spans`. In new memory, or
        in what `empty` gives for a size in bytes.

        Raises what `Grants.acquire` raises, and TierFailed when a file cannot be read.
        """
        read_bytes = 0
        use, ready = self._leases.begin(first, last)
        try:
            if not ready:
                return self._gather_mixed(use, slots, self._place(len(slots), empty))
            if empty is None:
                out = self._records[slots]
            elif self._records.flags.c_contiguous:
                out = np.take(self._records, slots, out=self._place(len(slots), empty), mode="clip")
            else:  # of overlapping records `take` would first copy them all
                out = self._place(len(slots), empty)
                out[:] = self._records[slots]
            read_bytes = out.nbytes
            return out
        finally:
            self._leases.end(use, read_bytes)

    def join(
        self,
        addresses: Ints,
        ends: Ints,
        first: Ints,
        last: Ints,
        empty: Callable[[int], Bytes] | None = None,
    ) -> Bytes:
        """Ranges of bytes one behind the other; `first`, `last` are their `spans`. In new memory, or in what `empty`
        gives for a size in bytes. Raises as `gather`."""
        memory = self._leases.range.memory
        read_bytes = 0
        use, ready = self._leases.begin(first, last)
        try:
            if not ready:
                return self._join_mixed(use, addresses, ends, empty)
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
            self._leases.end(use, read_bytes)

    def read(self, addresses: Ints, lengths: Ints) -> list[bytes | None]:
        """The bytes of each range, in order; None where the length is negative (an absent field)."""
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
    def on_disk(self) -> bool:
        """Whether extents are held as files: `expect` does something for those alone."""
        return self._leases.files > 0

    def expect(self, addresses: Ints, lengths: Ints) -> None:
        """These ranges will be read next; see `FileReads.expect`."""
        self._far.expect(addresses, lengths)

    def array(self) -> Bytes:
        """The whole address space as one flat read-only array, every extent mapped and kept.

        Raises OutOfSpace when an extent is not in memory (a file) or more than the mapping limit, and the error of an
        object that is missing.
        """
        leases = self._leases
        if not leases.kept:
            self._keep_all()
        return leases.range.array

    def origin_bytes(self) -> dict[str, int]:
        """Bytes read so far, by where they lay."""
        return self._leases.origin_bytes()

    def close(self) -> None:
        """Release every extent. The caller has ended its reads."""
        if self._open:
            self._open = False
            del self._records
            self._leases.close()

    def drop(self) -> None:
        """Nobody reads any more: as `close`, unless `array` gave a view away."""
        if not self._leases.kept:
            self.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited and forget the rest; say nothing to anybody."""
        self._open = False
        self._leases.abandon()

    # ---- reads

    def _keep_all(self) -> None:
        leases, count = self._leases, len(self._starts)
        with leases.keeping_all():
            for at in range(0, count, MAX_GROUP):
                extents = np.arange(at, min(at + MAX_GROUP, count))
                use, _ = leases.begin(extents, extents)
                try:
                    leases.ensure(use, extents.tolist())
                    self._far.must_be_whole(use)
                finally:
                    leases.end(use)
                if not leases.mapped[extents].all():
                    break
        if not leases.kept:
            raise OutOfSpace(
                f"the {count} extents are not all in a daemon's memory: start one whose --ram holds them, "
                "or read by sample"
            )

    def _record_view(self) -> Records:
        """Every record as one opaque item: numpy gathers those as fast as rows, overlapping ones too."""
        layout, flat = self._catalog.layout, self._leases.range.array
        if not isinstance(layout, Fixed):
            return np.empty(0, "V1")
        count = max(0, (flat.size - layout.record_bytes) // layout.stride_bytes + 1)
        view: Records = np.ndarray((count,), f"V{layout.record_bytes}", flat, 0, (layout.stride_bytes,))
        return view

    def _place(self, count: int, empty: Callable[[int], Bytes] | None) -> Records:
        """Memory for records."""
        layout = self._catalog.layout
        assert isinstance(layout, Fixed), "only records of one size can be gathered"
        kind = f"V{layout.record_bytes}"
        return np.empty(count, kind) if empty is None else empty(count * layout.record_bytes).view(kind)

    def _passes(self, use: Use, first: Ints, last: Ints) -> Iterator[Ints]:
        """Cut ranges into parts, by extent, and yield each when all that it touches is held: at most `MAX_GROUP`
        extents, down to one range's when the holder has no room. Raises OutOfSpace when not even that fits."""
        if self._leases.files:
            self._lying.look()
        waiting = [np.argsort(first, kind="stable")]
        while waiting:
            part = waiting.pop()
            begins = first[part]
            needed = touched(begins, begins if last is first else last[part])
            if len(needed) <= MAX_GROUP and self._leases.ensure(use, needed):
                yield part
            elif len(part) > 1:
                half = len(part) // 2
                waiting += [part[half:], part[:half]]
            else:
                wait_for_room(self._leases, use, needed, self._timeout_s)
                yield part

    def _gather_mixed(self, use: Use, slots: Ints, out: Records) -> Records:
        layout, first, last = self._catalog.layout, use.first, use.last
        assert isinstance(layout, Fixed), "only records of one size can be gathered"
        size = layout.record_bytes
        memory = out.view(np.uint8).data
        for part in self._passes(use, first, last):
            whole = self._lies_mapped(first[part], last[part])
            near, far = part[whole], part[~whole]
            if len(near):
                out[near] = self._records[slots[near]]
                self._leases.count(first[near], len(near) * size)
            self._leases.count(first[far], len(far) * size)
            into = [memory[at * size : (at + 1) * size] for at in far.tolist()]
            self._far.read_into(use, slots[far] * layout.stride_bytes, first[far], into)
        return out

    def _join_mixed(
        self, use: Use, addresses: Ints, ends: Ints, empty: Callable[[int], Bytes] | None
    ) -> Bytes:
        lengths, memory = ends - addresses, self._leases.range.memory
        size = int(lengths.sum())
        out = np.empty(size, np.uint8) if empty is None else empty(size)
        places = _parts(out, lengths)
        for part in self._passes(use, use.first, use.last):
            part = part[lengths[part] > 0]
            whole = self._lies_mapped(use.first[part], use.last[part])
            near, far = part[whole], part[~whole]
            for at in near.tolist():
                places[at][:] = memory[addresses[at] : ends[at]]
            self._leases.count(use.first[part], int(lengths[part].sum()))
            self._far.read_into(use, addresses[far], use.first[far], [places[at] for at in far.tolist()])
        return out

    def _read_all(self, addresses: Ints, lengths: Ints) -> list[bytes | None]:
        """Ranges of at least one byte; one copy each."""
        first, last = self.spans(addresses, lengths)
        ends = addresses + lengths
        memory = self._leases.range.memory
        read_bytes = 0
        use, ready = self._leases.begin(first, last)
        try:
            if ready:
                read_bytes = int(lengths.sum())
                return [
                    bytes(memory[at:end]) for at, end in zip(addresses.tolist(), ends.tolist(), strict=True)
                ]
            out: list[bytes | None] = [None] * len(first)
            for part in self._passes(use, first, last):
                near = self._lies_mapped(first[part], last[part])
                for at in part[near].tolist():
                    out[at] = bytes(memory[addresses[at] : ends[at]])
                self._leases.count(first[part[near]], int(lengths[part[near]].sum()))
                self._far.read(part[~near], use, addresses, lengths, out)
            return out
        finally:
            self._leases.end(use, read_bytes)

    def _lies_mapped(self, first: Ints, last: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which ranges can be read from the mapping; what spans three extents or more is left to the slow way."""
        mapped = self._leases.mapped
        if last is first:
            return mapped[first]
        return mapped[first] & mapped[last] & (last - first <= 1)


def _parts(memory: Bytes, sizes: Ints) -> list[memoryview]:
    """Memory in consecutive parts."""
    bounds = [0, *np.cumsum(sizes).tolist()]
    return [memory.data[low:high] for low, high in itertools.pairwise(bounds)]
