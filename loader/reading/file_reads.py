"""Reads of what is not mapped: ranges that lie in files, and those that span them."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import CorruptData, DeadlineExceeded, TierFailed
from loader.reading.changed_files import ChangedFiles
from loader.reading.lease_table import HeldExtent, Ints, Leases, Use, touched
from loader.reading.preadv import FileRange, announce, read_bytes, read_into
from loader.reading.verified_reads import VerifiedReads
from loader.reading.wait_for_room import PAUSE_S, wait_for_room

_log = logging.getLogger("cachesvc")

MAX_TOLD = 65_536
"""Ranges remembered as announced to the kernel; forgetting one costs 2 us, when it is announced again."""
VERIFY_TRIES = 3
"""A copy that was dropped is right when it is filled again; what is wrong then too is not the disk's doing."""


class FileReads:
    """What a reader reads by preadv. The caller holds a `Use` that leases the extents."""

    def __init__(
        self,
        catalog: Catalog,
        leases: Leases,
        lying: ChangedFiles,
        timeout_s: float,
        suspect: Callable[[Sequence[int]], None] | None,
    ) -> None:
        """See `ExtentReader`."""
        self._leases, self._lying, self._timeout_s = leases, lying, timeout_s
        self._starts = catalog.extent_starts
        self._verified = VerifiedReads(catalog, suspect) if suspect is not None else None
        self._told: set[int] = set()

    def expect(self, addresses: Ints, lengths: Ints) -> None:
        """These ranges will be read next: what of them lies in files that are held, the kernel begins to read now.
        It does not wait, and asks for no extent. A range counts as far as its first extent goes."""
        began = time.perf_counter()
        order = np.argsort(addresses)
        addresses, lengths = addresses[order], lengths[order]
        first = np.searchsorted(self._starts, addresses, "right") - 1
        places = zip(self._inside(addresses, first), lengths.tolist(), first.tolist(), strict=True)
        with self._leases.kept_files(touched(first, first)) as files:
            wanted = [
                FileRange(files[extent].fd, files[extent].offset + inside, size, [], extent)
                for inside, size, extent in places
                if extent in files and size > 0
            ]
            announce(wanted)
        if len(wanted) == len(addresses):
            if len(self._told) > MAX_TOLD:
                self._told.clear()  # of iterations that were abandoned
            self._told.update(addresses.tolist())
        self._leases.stages.read(began)

    def read_into(self, use: Use, addresses: Ints, first: Ints, into: Sequence[memoryview]) -> None:
        """Ranges that lie in files, or span them."""
        wanted: list[FileRange] = []
        ranges: list[tuple[int, memoryview, int]] = []
        for inside, view, extent in zip(self._inside(addresses, first), into, first.tolist(), strict=True):
            held = _sound(self._leases.held[extent], inside, len(view))
            if self._verified is None and held.fd >= 0 and inside + len(view) <= held.size_bytes:
                wanted.append(FileRange(held.fd, held.offset + inside, len(view), [view], extent))
            else:
                ranges.append((inside, view, extent))
        began = time.perf_counter()
        try:
            read_into(wanted, self._was_told(addresses))
            self._fill(use, ranges)
        except TierFailed:
            self._lying.must_stand()
            raise
        self._leases.stages.read(began)

    def read(self, part: Ints, use: Use, addresses: Ints, lengths: Ints, out: list[bytes | None]) -> None:
        """What lies in files, or spans them: in the order of the disk, all announced before the first is read."""
        alone: list[tuple[int, FileRange]] = []
        spanning: list[tuple[int, bytearray]] = []
        ranges: list[tuple[int, memoryview, int]] = []
        part = part[np.argsort(addresses[part])]
        sizes, extents = lengths[part].tolist(), use.first[part].tolist()
        insides = self._inside(addresses[part], use.first[part])
        for at, inside, size, extent in zip(part.tolist(), insides, sizes, extents, strict=True):
            held = _sound(self._leases.held[extent], inside, size)
            self._leases.count_of(held, size)
            if self._verified is None and held.fd >= 0 and inside + size <= held.size_bytes:
                alone.append((at, FileRange(held.fd, held.offset + inside, size, [], extent)))
            else:
                buffer = bytearray(size)
                spanning.append((at, buffer))
                ranges.append((inside, memoryview(buffer), extent))
        began = time.perf_counter()
        if not self._was_told(addresses[part]):
            announce([each for _, each in alone])
        try:
            self._fill(use, ranges)
            for at, each in alone:
                out[at] = read_bytes(each)
        except TierFailed:
            self._lying.must_stand()
            raise
        self._leases.stages.read(began)
        for at, buffer in spanning:
            out[at] = bytes(buffer)

    def must_be_whole(self, use: Use) -> None:
        """Raise the error of an object that is missing in what a read looks at."""
        for extent in use.looks_at():
            if (held := self._leases.held.get(extent)) is not None:
                _sound(held, 0, held.size_bytes)

    def _was_told(self, addresses: Ints) -> bool:
        """Whether all of these were expected; only once, since a later read may find them forgotten."""
        numbers = addresses.tolist()
        told = self._told.issuperset(numbers)
        self._told.difference_update(numbers)
        return told

    def _inside(self, addresses: Ints, extents: Ints) -> list[int]:
        """How far into their extents addresses lie."""
        inside: list[int] = (addresses - self._starts[extents]).tolist()
        return inside

    def _fill(self, use: Use, ranges: Sequence[tuple[int, memoryview, int]]) -> None:
        """Fill (place in the first extent, memory, first extent) from wherever these are held, and all of them are."""
        if not ranges:
            return
        if self._verified is None:
            read_into([piece for one in ranges for piece in self._pieces(*one)])
            return
        needed = sorted(use.extents or ())
        for _ in range(VERIFY_TRIES):
            wanted = [piece for one in ranges for piece in self._pieces(*one)]
            wrong = self._verified.read(wanted, self._leases.held)
            if not wrong:
                return
            _log.warning("cached bytes do not match their checksums: asking again for extents %s", [*wrong])
            self._verified.suspect([*wrong])
            self._exchange(use, wrong)
            wait_for_room(self._leases, use, needed, self._timeout_s)
        raise CorruptData(
            f"extents {[*wrong]} did not match their checksums in {VERIFY_TRIES} reads, though the daemon found or "
            "made them right; look at this node's memory and disks"
        )

    def _exchange(self, use: Use, wrong: dict[int, HeldExtent]) -> None:
        deadline = time.monotonic() + self._timeout_s
        while not self._leases.exchange(use, wrong):
            if time.monotonic() >= deadline:
                raise DeadlineExceeded(f"extents {[*wrong]} are wrong, and other reads do not let go of them")
            time.sleep(PAUSE_S)

    def _pieces(self, inside: int, into: memoryview, extent: int) -> Iterator[FileRange]:
        """One range from so far inside an extent, over as many consecutive ones as it spans: what is mapped is
        copied, the rest is wanted."""
        done, memory = 0, self._leases.range.memory
        while done < len(into):
            held = _sound(self._leases.held[extent], inside, len(into) - done)
            part = into[done : done + held.size_bytes - inside]
            if held.fd < 0:
                address = int(self._starts[extent]) + inside
                part[:] = memory[address : address + len(part)]
            else:
                yield FileRange(held.fd, held.offset + inside, len(part), [part], extent)
            done += len(part)
            inside, extent = 0, extent + 1


def _sound(held: HeldExtent, inside: int, size_bytes: int) -> HeldExtent:
    """A held extent, from which so many bytes are wanted. Raises the error of an object that is missing there."""
    if held.holes is not None:
        held.holes.check(inside, size_bytes)
    return held
