"""Reads of what is not mapped: ranges in files, and ranges that span several extents."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import CorruptData, DeadlineExceeded, TierFailed
from cachesvc.core.limits import ROOM_PAUSE_S, VERIFY_TRIES
from cachesvc.core.records.dataset_state import SMALL_SAMPLE_BYTES
from cachesvc.system.deadline import Deadline
from loader.reading.active_reads import ActiveRead, Ints, touched
from loader.reading.address_range import Bytes
from loader.reading.changed_files import ChangedFiles
from loader.reading.held_extents import ORIGINS, HeldExtent
from loader.reading.io_uring import give_up_ring, ring_of_thread
from loader.reading.lease_table import Leases
from loader.reading.preadv import FileRange, announce, read_bytes, read_into
from loader.reading.verified_reads import VerifiedReads

_log = logging.getLogger("cachesvc")

FROM_DISK_S = 8e-6
"""A batch whose ranges took longer each came from the disk: the page cache takes 1 to 2 us for 4 KiB."""
ANNOUNCED_BATCHES = 64
"""So many batches are announced ahead of their reads after one that came from the disk."""
MAX_ANNOUNCED = 65_536
"""Ranges remembered as announced to the kernel; a forgotten range is announced again, for 2 us."""
_CACHED = ORIGINS.index("nvme")


class FileReads:
    """Reads ranges by preadv. The caller registers an `ActiveRead` that holds the extents."""

    def __init__(
        self,
        catalog: Catalog,
        leases: Leases,
        changed_files: ChangedFiles,
        timeout_s: float,
        suspect: Callable[[Sequence[int]], None],
        verify: bool,
    ) -> None:
        """See `ExtentReader`."""
        self._leases, self._changed_files = leases, changed_files
        self._timeout_s = timeout_s
        self._table, self._memory = leases.held.by_index, leases.held.range.memory
        self._held = leases.held
        self._starts, self._ends = catalog.extent_starts, catalog.extent_starts + catalog.extent_sizes
        self.reads_ahead = True
        """Whether ranges are worth announcing: they come from the disk."""
        self._to_announce = 0
        """So many batches of small ranges are announced, since one before came from the disk."""
        self._suspect = suspect
        self._verified = VerifiedReads(catalog) if verify else None
        self._announced: set[int] = set()

    def expect(self, addresses: Ints, lengths: Ints) -> None:
        """Have the kernel begin to read the parts of these ranges that are in held files. Requests no extent, and does
        not wait. Only the part in a range's first extent counts."""
        if self._to_announce:
            self._to_announce -= 1
        began = time.perf_counter()
        order = np.argsort(addresses)
        addresses, lengths = addresses[order], lengths[order]
        first = np.searchsorted(self._starts, addresses, "right") - 1
        offsets = self._offsets(addresses, first)
        with self._leases.open_files(touched(first, first)) as files:
            wanted = [
                FileRange(files[extent].fd, files[extent].offset + offset, size, [], extent)
                for offset, size, extent in zip(offsets, lengths.tolist(), first.tolist(), strict=True)
                if extent in files and size > 0
            ]
            announce(wanted)
        if len(wanted) == len(addresses):
            if len(self._announced) > MAX_ANNOUNCED:
                self._announced.clear()  # left by abandoned iterations
            self._announced.update(addresses.tolist())
        self._leases.wait_clock.read(began)

    def read_into(
        self, read: ActiveRead, addresses: Ints, lengths: Ints, first: Ints, out: Bytes, places: Ints
    ) -> None:
        """Copy ranges that are in files, or span extents, to `out[places[i]:]`. Raises TierFailed, SourceChanged,
        CorruptData."""
        left = self._read_together(addresses, lengths, first, out, places)
        if len(left):
            memory, ends = out.data, (places + lengths)[left].tolist()
            into = [memory[begin:end] for begin, end in zip(places[left].tolist(), ends, strict=True)]
            self._read_each(read, addresses[left], first[left], into)

    def _read_together(self, addresses: Ints, lengths: Ints, first: Ints, out: Bytes, places: Ints) -> Ints:
        """Read small ranges by one system call, where that is possible. Returns which are left: those that
        failed, span extents or lie in no file."""
        everything = np.arange(len(addresses))
        ring = ring_of_thread() if self._are_small(lengths) else None
        if ring is None:
            return everything
        files = self._held.file_of[first]
        in_file = (files >= 0) & (addresses + lengths <= self._ends[first])
        if not in_file.all():
            part = np.flatnonzero(in_file)
            failed = self._read_together(addresses[part], lengths[part], first[part], out, places[part])
            return np.concatenate([np.flatnonzero(~in_file), part[failed]])
        began = time.perf_counter()
        announced = bool(self._announced) and self._were_announced(addresses)
        offsets = addresses - self._starts[first] + self._held.offset_in_file[first]
        try:
            found = ring.read(files, offsets, lengths, out, places)
        except OSError:
            give_up_ring()
            return everything
        if not announced:
            from_disk = time.perf_counter() - began > len(addresses) * FROM_DISK_S
            self._to_announce = ANNOUNCED_BATCHES if from_disk else 0
        self.reads_ahead = self._to_announce > 0
        self._leases.wait_clock.read(began)
        return np.flatnonzero(found != lengths)

    def _are_small(self, lengths: Ints) -> bool:
        """Whether ranges are read together. Large ones are announced ahead and read one by one, without a second copy."""
        return (
            self._verified is None
            and len(lengths) > 1
            and int(lengths.sum()) <= len(lengths) * SMALL_SAMPLE_BYTES
        )

    def _read_each(self, read: ActiveRead, addresses: Ints, first: Ints, into: Sequence[memoryview]) -> None:
        """Fill `into` by preadv."""
        self.reads_ahead = True
        ranges = list(zip(self._offsets(addresses, first), into, first.tolist(), strict=True))

        def fill() -> None:
            began = time.perf_counter()
            self._fill(read, ranges, self._were_announced(addresses))
            self._leases.wait_clock.read(began)

        self._repaired(read, fill)

    def _repaired(self, read: ActiveRead, call: Callable[[], None]) -> None:
        """Make a call, and make it again with another copy where the cached one cannot be read: its file was cut, or its
        disk fails. Raises as `read_into`."""
        tries: Counter[int] = Counter()
        while True:
            try:
                return call()
            except TierFailed as error:
                self._changed_files.raise_if_changed()
                copy, needed = self._table.get(error.extent), sorted(read.extents or ())
                tries[error.extent] += 1
                if copy is None or copy.origin != _CACHED or tries[error.extent] == VERIFY_TRIES:
                    raise
                _log.warning("%s; requesting it again", error)
                self._suspect([error.extent])
                self._discard(read, {error.extent: copy})
                self._leases.await_room(read, needed)

    def read(
        self, part: Ints, read: ActiveRead, addresses: Ints, lengths: Ints, out: list[bytes | None]
    ) -> None:
        """Set `out` for the ranges of `part`: in disk order, all announced before the first is read. Raises as
        `read_into`."""
        if self._read_small(part, read.first[part], addresses[part], lengths[part], out):
            return
        part = part[np.argsort(addresses[part])]
        self._repaired(read, lambda: self._read_sorted(part, read, addresses, lengths, out))

    def _read_sorted(
        self, part: Ints, read: ActiveRead, addresses: Ints, lengths: Ints, out: list[bytes | None]
    ) -> None:
        counted: list[tuple[int, int]] = []
        alone: list[tuple[int, int, int, int, int]] = []
        spanning: list[tuple[int, bytearray]] = []
        ranges: list[tuple[int, memoryview, int]] = []
        table, in_place = self._table, self._verified is None
        sizes, extents = lengths[part].tolist(), read.first[part].tolist()
        offsets = self._offsets(addresses[part], read.first[part])
        for at, offset, size, extent in zip(part.tolist(), offsets, sizes, extents, strict=True):
            held = table[extent]
            if held.holes is not None:
                held.holes.check(offset, size)
            counted.append((held.origin, size))
            if in_place and held.fd >= 0 and offset + size <= held.size_bytes:
                alone.append((at, held.fd, held.offset + offset, size, extent))
            else:
                buffer = bytearray(size)
                spanning.append((at, buffer))
                ranges.append((offset, memoryview(buffer), extent))
        self._leases.count_origins(counted)
        began = time.perf_counter()
        if not self._were_announced(addresses[part]) and len(alone) > 1:
            for _, fd, offset, size, _ in alone:
                os.posix_fadvise(fd, offset, size, os.POSIX_FADV_WILLNEED)
        self._fill(read, ranges)
        for at, *place in alone:
            out[at] = read_bytes(*place)
        self._leases.wait_clock.read(began)
        for at, buffer in spanning:
            out[at] = bytes(buffer)

    def _read_small(
        self, part: Ints, first: Ints, addresses: Ints, lengths: Ints, out: list[bytes | None]
    ) -> bool:
        """Set `out` by one system call; returns False, and sets nothing, where that is not possible."""
        ends = np.cumsum(lengths)
        memory = np.empty(int(ends[-1]) if len(ends) else 0, np.uint8)
        if not len(ends) or len(self._read_together(addresses, lengths, first, memory, ends - lengths)):
            return False
        self._leases.count(first, len(memory))
        begin, data = 0, memory.data
        for at, end in zip(part.tolist(), ends.tolist(), strict=True):
            out[at] = bytes(data[begin:end])
            begin = end
        return True

    def check_holes(self, read: ActiveRead) -> None:
        """Raise the error of an object that is missing in the extents that a read needs."""
        for extent in read.needs():
            if (held := self._table.get(extent)) is not None:
                _checked(held, 0, held.size_bytes)

    def _were_announced(self, addresses: Ints) -> bool:
        """True if `expect` announced all of these; they are forgotten then."""
        numbers = addresses.tolist()
        announced = self._announced.issuperset(numbers)
        self._announced.difference_update(numbers)
        return announced

    def _offsets(self, addresses: Ints, extents: Ints) -> list[int]:
        """Offsets of addresses in their extents."""
        offsets: list[int] = (addresses - self._starts[extents]).tolist()
        return offsets

    def _fill(
        self, read: ActiveRead, ranges: Sequence[tuple[int, memoryview, int]], announced: bool = False
    ) -> None:
        """Fill ranges (offset in the first extent, memory, first extent) whose extents are all held."""
        if not ranges:
            return
        if self._verified is None:
            read_into([piece for one in ranges for piece in self._file_ranges(*one)], announced)
            return
        needed = sorted(read.extents or ())
        for _ in range(VERIFY_TRIES):
            wanted = [piece for one in ranges for piece in self._file_ranges(*one)]
            wrong = self._verified.read(wanted, self._table)
            if not wrong:
                return
            _log.warning("cached bytes do not match their checksums: requesting extents %s again", [*wrong])
            self._suspect([*wrong])
            self._discard(read, wrong)
            self._leases.await_room(read, needed)
        raise CorruptData(
            f"extents {[*wrong]} did not match their checksums in {VERIFY_TRIES} reads, though the daemon had "
            "verified or refilled them; look at this node's memory and disks"
        )

    def _discard(self, read: ActiveRead, wrong: dict[int, HeldExtent]) -> None:
        deadline = Deadline(self._timeout_s)
        while not self._leases.discard(read, wrong):
            if not deadline.pause(ROOM_PAUSE_S):
                raise DeadlineExceeded(f"extents {[*wrong]} are wrong, and other reads still use them")

    def _file_ranges(self, offset: int, into: memoryview, extent: int) -> Iterator[FileRange]:
        """Copy the mapped parts of one range, which begins at `offset` of `extent` and may span the extents after it;
        yield the other parts."""
        done = 0
        while done < len(into):
            held = _checked(self._table[extent], offset, len(into) - done)
            part = into[done : done + held.size_bytes - offset]
            if held.fd < 0:
                address = int(self._starts[extent]) + offset
                part[:] = self._memory[address : address + len(part)]
            else:
                yield FileRange(held.fd, held.offset + offset, len(part), [part], extent)
            done += len(part)
            offset, extent = 0, extent + 1


def _checked(held: HeldExtent, offset: int, size_bytes: int) -> HeldExtent:
    """The extent. Raises the error of an object that is missing in the bytes wanted of it."""
    if held.holes is not None:
        held.holes.check(offset, size_bytes)
    return held
