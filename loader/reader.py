"""Extents -> bytes. Memory is mapped at its catalog address and gathered from; files are read with preadv.

A page fault on a file mapping would hold the interpreter lock and turn a disk error into SIGBUS; preadv
releases the lock and raises. No view of a mapping leaves this module (`array` excepted), and a mapping is
replaced or removed only while no read is in flight: a gather runs without the interpreter lock.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Fixed
from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.model import PAGE_BYTES
from cachesvc.grants import Granted, Grants
from loader.forks import abandon_in_children
from loader.heap import keep_freed_memory
from loader.spans import AddressRange, Bytes

Ints = np.ndarray[Any, np.dtype[np.int64]]
Records = np.ndarray[Any, np.dtype[np.void]]

ORIGINS = ("ram", "nvme", "direct", "local")
MAPPABLE = frozenset({"ram", "direct"})
"""Sealed or private memory: a mapping of it cannot fault on a disk."""
MAPPED_BYTES = 1 << 40
"""Mapping costs page tables (2 MiB a GiB), not memory: the tier holds the bytes once for everybody."""
MAX_FILES = 256
"""Descriptors held open for files; the usual limit of a process is 1,024."""
ACQUIRE_TIMEOUT_S = 300.0
"""A cold extent behind a throttled source takes minutes at worst; past this somebody should know."""
REFUSED_PAUSE_S = 0.02
"""Who was refused and has no way around asks again: other readers give room back after each of their reads."""
REFUSED_WAIT_S = 30.0
"""Room that did not come in this time is not there: other readers' reads take milliseconds."""
MAX_GROUP = 64
"""Extents asked for at once; one read that touches more goes through them in groups."""


@dataclass(slots=True)
class _Held:
    """A leased extent; `fd` is -1 once it is mapped."""

    fd: int
    offset: int
    size_bytes: int
    origin: int


class Reader:
    """Reads one dataset through `Grants`. Safe to share between threads. A forked child makes its own."""

    def __init__(
        self,
        catalog: Catalog,
        grants: Grants,
        mapped_bytes: int = MAPPED_BYTES,
        timeout_s: float = ACQUIRE_TIMEOUT_S,
    ) -> None:
        """`timeout_s`: how long one read may wait for its extents."""
        self._catalog = catalog
        self.grants = grants
        keep_freed_memory()
        self._timeout_s = timeout_s
        self._limit = mapped_bytes
        self._range = AddressRange(catalog.space_bytes)
        self._starts, self._sizes = catalog.extent_starts, catalog.extent_sizes
        self._ends = self._starts + self._sizes
        self._mapped = np.zeros(len(self._starts), bool)
        self._held: OrderedDict[int, _Held] = OrderedDict()
        self._brief: set[int] = set()
        self._pressed = False
        self._mapped_bytes = 0
        self._files = 0
        self._lock = threading.RLock()
        self._reading = 0
        self._origin_bytes = dict.fromkeys(ORIGINS, 0)
        self._one_origin: int | None = None
        self._records = self._record_view()
        self._open = True
        abandon_in_children(self)

    # ---- what callers use

    def spans(self, addresses: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """The first and the last extent that each byte range touches (lengths of at least 1)."""
        first = np.searchsorted(self._starts, addresses, "right") - 1
        ends = addresses + lengths
        last = (
            first
            if (ends <= self._ends[first]).all()
            else np.searchsorted(self._starts, ends - 1, "right") - 1
        )
        return first, last

    def gather(self, slots: Ints, first: Ints, last: Ints) -> Records:
        """Records of a Fixed layout, one opaque item each, in new memory; `first`, `last` are their `spans`.

        Raises what `Grants.acquire` raises, and TierFailed when a file cannot be read.
        """
        mapped = self._mapped
        with self._lock:
            ready = mapped[first].all() and (last is first or mapped[last].all())
            self._reading += 1
        try:
            if ready:
                out = self._records[slots]
                self._count(first, out.nbytes)
                return out
            return self._gather_mixed(slots, first, last)
        finally:
            with self._lock:
                if self._brief:
                    self._give_back(first, last)
                self._reading -= 1

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

    def array(self) -> Bytes:
        """The whole address space as one flat read-only array, every extent mapped and kept.

        Raises OutOfSpace when an extent is not in memory (a file) or more than the mapping limit.
        """
        for at in range(0, len(self._starts), MAX_GROUP):
            self._ensure(list(range(at, min(at + MAX_GROUP, len(self._starts)))))
        if not self._mapped.all():
            lacking = int((~self._mapped).sum())
            raise OutOfSpace(
                f"{lacking} of {len(self._starts)} extents are not in memory; give the daemon more --ram, "
                "or read by sample"
            )
        with self._lock:
            self._reading += 1  # never given back: the mappings stay as long as the caller may look
        return self._range.array

    def origin_bytes(self) -> dict[str, int]:
        """Bytes read so far, by where they lay."""
        return dict(self._origin_bytes)

    def close(self) -> None:
        """Release every extent. The caller has ended its reads."""
        with self._lock:
            if self._open:
                self._open = False
                self._drop(list(self._held))
                self.grants.close()
                del self._records
                self._range.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited and forget the rest; say nothing to anybody."""
        self._open = False
        for held in self._held.values():
            if held.fd >= 0:
                os.close(held.fd)
        self._held.clear()
        self._range.forget()
        del self.grants

    # ---- leases

    def _ensure(self, extents: Sequence[int]) -> bool:
        """Lease what is not held yet: mapped while there is room, otherwise kept as an open descriptor. False
        when the holder refused some even after this reader gave back all that `extents` does not name."""
        needed = set(extents)
        with self._lock:
            for extent in needed & self._held.keys():
                self._held.move_to_end(extent)
            missing = [extent for extent in extents if extent not in self._held]
            if missing:
                self._make_room(missing, needed)
                missing = self._lease(missing)
            if missing:
                self._pressed = True
                self._drop([extent for extent in self._held if extent not in needed])
                missing = self._lease(missing)
            return not missing

    def _give_back(self, first: Ints, last: Ints) -> None:
        """After a read, of what streams by only that read's extents stay leased; nothing where room was refused:
        this reader may rest while others wait."""
        used = set() if self._pressed else set(self._needed(first, last))
        self._pressed = False
        self._drop(list(self._brief - used))

    def _lease(self, extents: Sequence[int]) -> list[int]:
        """Acquire; returns what was refused."""
        answers = self.grants.acquire(extents, self._timeout_s)
        for answer in answers:
            if isinstance(answer, Granted):
                self._take(answer)
        return [answer.extent for answer in answers if not isinstance(answer, Granted)]

    def _take(self, granted: Granted) -> None:
        held = _Held(granted.fd, granted.offset, granted.size_bytes, ORIGINS.index(granted.origin))
        self._held[granted.extent] = held
        if granted.brief:
            self._brief.add(granted.extent)
        self._pressed |= granted.once
        origins = {entry.origin for entry in (held, *self._any_held())}
        self._one_origin = held.origin if len(origins) == 1 else None
        fits = self._mapped_bytes + held.size_bytes <= self._limit
        if granted.origin in MAPPABLE and held.offset % PAGE_BYTES == 0 and fits and held.size_bytes:
            self._range.map(int(self._starts[granted.extent]), held.size_bytes, held.fd, held.offset)
            os.close(held.fd)
            held.fd = -1
            self._mapped_bytes += held.size_bytes
            self._mapped[granted.extent] = True
        else:
            self._files += 1

    def _any_held(self) -> list[_Held]:
        """One held extent stands for all while they share an origin."""
        if self._one_origin is None:
            return list(self._held.values())
        return [next(iter(self._held.values()))]

    def _make_room(self, missing: Sequence[int], needed: set[int]) -> None:
        """Release the least recently used, when this many more would exceed a limit."""
        coming = int(self._sizes[list(missing)].sum())
        over_bytes = self._mapped_bytes + coming - self._limit
        over_files = self._files + len(missing) - MAX_FILES
        drop: list[int] = []
        for extent, held in self._held.items():
            if over_bytes <= 0 and over_files <= 0:
                break
            if extent in needed:
                continue
            if held.fd < 0 and over_bytes > 0:
                over_bytes -= held.size_bytes
                drop.append(extent)
            elif held.fd >= 0 and over_files > 0:
                over_files -= 1
                drop.append(extent)
        self._drop(drop)

    def _drop(self, extents: Sequence[int]) -> None:
        """Unmap, close, release; nothing at all while another read is in flight (it may be looking)."""
        if self._reading > 1 or not extents:
            return
        for extent in extents:
            held = self._held.pop(extent)
            self._brief.discard(extent)
            if held.fd >= 0:
                os.close(held.fd)
                self._files -= 1
            else:
                self._mapped[extent] = False
                self._range.unmap(int(self._starts[extent]), held.size_bytes)
                self._mapped_bytes -= held.size_bytes
        self.grants.release(extents)

    # ---- reads

    def _record_view(self) -> Records:
        """Every record as one opaque item: numpy gathers those as fast as rows, overlapping ones too."""
        layout = self._catalog.layout
        if not isinstance(layout, Fixed):
            return np.empty(0, "V1")
        count = max(0, (self._range.array.size - layout.record_bytes) // layout.stride_bytes + 1)
        view: Records = np.ndarray(
            (count,), f"V{layout.record_bytes}", self._range.array, 0, (layout.stride_bytes,)
        )
        return view

    def _passes(self, first: Ints, last: Ints) -> Iterator[Ints]:
        """Cut ranges into parts, by extent, and yield each when all that it touches is held: at most `MAX_GROUP`
        extents, down to one range's when the holder has no room. Raises OutOfSpace when not even that fits."""
        waiting = [np.argsort(first, kind="stable")]
        while waiting:
            part = waiting.pop()
            needed = self._needed(first[part], last[part] if last is not first else first[part])
            if len(needed) <= MAX_GROUP and self._ensure(needed):
                yield part
            elif len(part) > 1:
                half = len(part) // 2
                waiting += [part[half:], part[:half]]
            else:
                self._wait_for(needed)
                yield part

    def _wait_for(self, needed: list[int]) -> None:
        """Lease the extents of one sample, when other readers have made room for them."""
        deadline = time.monotonic() + min(self._timeout_s, REFUSED_WAIT_S)
        while not self._ensure(needed):
            if time.monotonic() >= deadline:
                raise OutOfSpace(
                    f"no room for the {len(needed)} extents of one sample, and reading directly is off; give the "
                    "daemon more --ram or --nvme, or allow direct reads with CACHESVC=auto"
                )
            time.sleep(REFUSED_PAUSE_S)

    def _needed(self, first: Ints, last: Ints) -> list[int]:
        used = np.unique(first)
        if last is not first:
            used = np.union1d(used, last)
            wide = np.flatnonzero(last - first > 1)
            for at in wide.tolist():
                used = np.union1d(used, np.arange(first[at], last[at] + 1))
        found: list[int] = used.tolist()
        return found

    def _gather_mixed(self, slots: Ints, first: Ints, last: Ints) -> Records:
        layout = self._catalog.layout
        assert isinstance(layout, Fixed), "only records of one size can be gathered"
        out = np.empty(len(slots), f"V{layout.record_bytes}")
        memory = out.view(np.uint8).data
        for part in self._passes(first, last):
            whole = self._lies_mapped(first[part], last[part])
            near, far = part[whole], part[~whole]
            if len(near):
                out[near] = self._records[slots[near]]
                self._count(first[near], len(near) * layout.record_bytes)
            for at, address in zip(far.tolist(), (slots[far] * layout.stride_bytes).tolist(), strict=True):
                row = memory[at * layout.record_bytes : (at + 1) * layout.record_bytes]
                self._read_span(address, row, int(first[at]))
        return out

    def _read_all(self, addresses: Ints, lengths: Ints) -> list[bytes | None]:
        """Ranges of at least one byte; one copy each."""
        first, last = self.spans(addresses, lengths)
        ends = addresses + lengths
        memory = self._range.memory
        with self._lock:
            ready = self._lies_mapped(first, last).all()
            self._reading += 1
        try:
            if ready:
                self._count(first, int(lengths.sum()))
                return [
                    bytes(memory[at:end]) for at, end in zip(addresses.tolist(), ends.tolist(), strict=True)
                ]
            out: list[bytes | None] = [None] * len(first)
            for part in self._passes(first, last):
                self._read_part(part, first, last, addresses, ends, out)
            return out
        finally:
            with self._lock:
                if self._brief:
                    self._give_back(first, last)
                self._reading -= 1

    def _lies_mapped(self, first: Ints, last: Ints) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Which ranges can be read from the mapping; what spans three extents or more is left to the slow way."""
        if last is first:
            return self._mapped[first]
        return self._mapped[first] & self._mapped[last] & (last - first <= 1)

    def _read_part(
        self, part: Ints, first: Ints, last: Ints, addresses: Ints, ends: Ints, out: list[bytes | None]
    ) -> None:
        near = self._lies_mapped(first[part], last[part])
        memory = self._range.memory
        for at in part[near].tolist():
            out[at] = bytes(memory[addresses[at] : ends[at]])
        self._count(first[part[near]], int((ends - addresses)[part[near]].sum()))
        for at in part[~near].tolist():
            buffer = bytearray(int(ends[at] - addresses[at]))
            self._read_span(int(addresses[at]), memoryview(buffer), int(first[at]))
            out[at] = bytes(buffer)

    def _read_span(self, address: int, into: memoryview, extent: int) -> None:
        """One range, mapped or not, over as many consecutive extents as it spans."""
        done = 0
        while done < len(into):
            held = self._held[extent]
            inside = address + done - int(self._starts[extent])
            part = into[done : done + held.size_bytes - inside]
            if held.fd < 0:
                part[:] = self._range.memory[address + done : address + done + len(part)]
            else:
                _read_exactly(held.fd, held.offset + inside, part, extent)
            self._origin_bytes[ORIGINS[held.origin]] += len(part)
            done += len(part)
            extent += 1

    def _count(self, extents: Ints, size_bytes: int) -> None:
        """Attribute bytes to origins; exact while all held extents have one origin, else by share of ranges."""
        if self._one_origin is not None:
            self._origin_bytes[ORIGINS[self._one_origin]] += size_bytes
            return
        for extent, count in zip(*np.unique(extents, return_counts=True), strict=True):
            name = ORIGINS[self._held[int(extent)].origin]
            self._origin_bytes[name] += size_bytes * int(count) // len(extents)


def _read_exactly(fd: int, offset: int, into: memoryview, extent: int) -> None:
    while len(into):
        try:
            count = os.preadv(fd, [into], offset)
        except OSError as error:
            why = errno.errorcode.get(error.errno or 0, str(error.errno))
            raise TierFailed(
                f"extent {extent} cannot be read ({why}); look at the disk that holds it"
            ) from error
        if count == 0:
            raise TierFailed(
                f"extent {extent} ends {len(into)} bytes early: its file was cut while it was read"
            )
        into, offset = into[count:], offset + count
