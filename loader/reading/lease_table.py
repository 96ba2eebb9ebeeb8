"""Which extents this process holds, where each of them lies, and which reads look at them.

Two locks, held for moments. `_lock` guards what is held. `_giving` is held while what is owed is released: an
extent's release comes before its next lease. The holder of extents is asked without a lock, which may take minutes:
what is asked for is `_coming`, and only who needs one of those extents waits for it. A mapping is removed only while
no read looks at it: a read says first what it will look at (`begin`), then finds out what of it is here.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.protocol import Granted, Grants, Refused
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.holes import Holes
from cachesvc.core.model import PAGE_BYTES
from loader.reading.address_range import AddressRange
from loader.reading.wait_clock import WaitClock

Ints = np.ndarray[Any, np.dtype[np.int64]]

ORIGINS = ("ram", "nvme", "direct", "local")
MAPPABLE = frozenset({"ram", "direct"})
"""Sealed or private memory: a mapping of it cannot fault on a disk."""
MAX_FILES = 256
"""Descriptors held open for files; the usual limit of a process is 1,024."""


NONE: Ints = np.empty(0, np.int64)


class HeldExtent:
    """A leased extent; `fd` is -1 once it is mapped."""

    __slots__ = ("digests", "fd", "holes", "offset", "origin", "size_bytes")

    def __init__(self, granted: Granted, holes: Holes | None) -> None:
        self.fd, self.offset, self.size_bytes = granted.fd, granted.offset, granted.size_bytes
        self.origin = ORIGINS.index(granted.origin)
        self.digests: bytes | None = None
        self.holes = holes


class Use:
    """One read in flight: it looks at the extents of its ranges, or at `extents` once they are known."""

    __slots__ = ("extents", "first", "last")

    def __init__(self, first: Ints, last: Ints) -> None:
        self.first, self.last = first, last
        self.extents: frozenset[int] | None = None

    def looks_at(self) -> Iterable[int]:
        """The extents that must stay."""
        return touched(self.first, self.last) if self.extents is None else self.extents


class Leases:
    """The extents of one dataset that are leased through `grants`. Safe to share between threads."""

    def __init__(self, catalog: Catalog, grants: Grants, mapped_bytes: int, timeout_s: float) -> None:
        """Maps at most `mapped_bytes`; one request for extents may take `timeout_s`."""
        self.grants = grants
        self.stages = WaitClock()
        self.range = AddressRange(catalog.space_bytes)
        self._catalog = catalog
        self._starts, self._sizes = catalog.extent_starts, catalog.extent_sizes
        self._limit, self._timeout_s = mapped_bytes, timeout_s
        self.mapped = np.zeros(len(self._starts), bool)
        self._unmapped = len(self._starts)
        self.held: OrderedDict[int, HeldExtent] = OrderedDict()
        self._brief: set[int] = set()
        self._recalled: set[int] = set()
        """Held or under way, and recalled while a read looked at them."""
        self._owed: list[int] = []
        self._uses: set[Use] = set()
        self._pressed = False
        self._mapped_bytes = 0
        self.files = 0
        """Extents held as open descriptors."""
        self.kept = False
        """Views of the range are out."""
        # Locked by itself: a `with` on a Condition runs Python code, in which an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._came = threading.Condition(self._lock)
        self._coming: set[int] = set()
        self._giving = threading.Lock()
        self._closed = False
        self._origin_bytes = dict.fromkeys(ORIGINS, 0)
        self._one_origin: int | None = None

    # ---- reads in flight

    def begin(self, first: Ints, last: Ints) -> tuple[Use, bool]:
        """A read of ranges over extents begins; True when all of them are mapped: it may look at once."""
        use = Use(first, last)
        with self._lock:
            self._uses.add(use)
            ready = self.all_mapped(first, last)
            if not ready:
                use.extents = frozenset()  # nothing yet: `ensure` says what, part by part
        return use, ready

    def all_mapped(self, first: Ints, last: Ints) -> bool:
        """Whether ranges over these extents lie in the mapping; what spans three extents or more is not looked for."""
        mapped = self.mapped
        if not self._unmapped and last is first:  # 2 us less a batch
            return True
        return bool(
            mapped[first].all() and (last is first or (mapped[last].all() and (last - first <= 1).all()))
        )

    def end(self, use: Use, size_bytes: int = 0) -> None:
        """It is over, and has read so many bytes that nobody counted yet. Of what streams by only this read's extents stay
        leased; nothing where room was refused: this reader may rest while others wait."""
        with self._lock:
            self._uses.discard(use)
            if size_bytes:
                self._count(use.first, size_bytes)
            if not (self._brief or self._recalled):
                return
            used = set() if self._pressed else set(touched(use.first, use.last))
            self._pressed = False
            self._drop(list(self._brief - used | self._recalled & self.held.keys()))
        if self._owed:
            self._give_back()

    @contextmanager
    def keeping_all(self) -> Iterator[None]:
        """What is leased meanwhile stays; until `close` where all is mapped at the end, for views of the range go out
        then. Else nothing stays."""
        everything = np.arange(len(self._starts))
        use = Use(everything, everything)
        with self._lock:
            self._uses.add(use)
        try:
            yield
        finally:
            with self._lock:
                self.kept = bool(self.mapped.all())
                if self.kept:
                    self.range.leave_to_children()
                else:
                    self._uses.discard(use)
                    self._drop(list(self.held))
            self._give_back()

    def ensure(self, use: Use, extents: Sequence[int]) -> bool:
        """Lease what is not held yet: mapped while there is room, otherwise kept as an open descriptor. `use`
        looks at these extents alone from now on. False when the holder refused some even after this reader gave
        back all that nobody looks at. Raises what `Grants.acquire` raises."""
        needed = frozenset(extents)
        while True:
            mine: list[int] = []
            try:
                with self._lock:
                    use.extents = needed
                    missing = self._missing(extents)
                    mine = [extent for extent in missing if extent not in self._coming]
                    if missing and not mine:
                        began = time.perf_counter()
                        self._came.wait()  # who asked for them ends within the time that a request may take
                        self.stages.acquired(began, None)
                        continue
                    self._coming.update(mine)
                    if mine:
                        self._make_room(self._coming)
                if not missing:
                    return True
                if self._fetch(mine):
                    with self._lock:
                        use.extents = frozenset()  # while it waits, another may take the room
                    return False
            finally:  # also after an interrupt: what nobody fetches, nobody may wait for
                if mine:
                    with self._lock:
                        self._coming.difference_update(mine)
                        self._came.notify_all()

    def ease(self) -> None:
        """Give back what is mapped and no read looks at."""
        with self._lock:
            self._drop([extent for extent, held in self.held.items() if held.fd < 0])
        self._give_back()

    def forgo(self, extents: Iterable[int]) -> None:
        """What is held of these is wrong, or others need the room: it goes back, now or when the last read that looks at it
        is over."""
        with self._lock:
            # Of what is asked for just now the grant may be under way: it was sent behind this, or opened for longer.
            self._recalled.update(each for each in extents if each in self.held or each in self._coming)
            self._drop(list(self._recalled & self.held.keys()))
        self._give_back()

    @contextmanager
    def kept_files(self, extents: Iterable[int]) -> Iterator[dict[int, HeldExtent]]:
        """Those of `extents` that are held as open descriptors; none of them is closed meanwhile."""
        use = Use(NONE, NONE)
        with self._lock:
            held = {extent: self.held[extent] for extent in extents if extent in self.held}
            files = {extent: each for extent, each in held.items() if each.fd >= 0}
            use.extents = frozenset(files)
            self._uses.add(use)
        try:
            yield files
        finally:
            with self._lock:
                self._uses.discard(use)

    def exchange(self, use: Use, wrong: Mapping[int, HeldExtent]) -> bool:
        """Let go of copies that are wrong, so that `ensure` leases these extents anew; until then `use` looks at
        nothing. False while another read looks at one of them."""
        with self._lock:
            use.extents = frozenset()
            self._drop([extent for extent, held in wrong.items() if self.held.get(extent) is held])
            return not any(self.held.get(extent) is held for extent, held in wrong.items())

    def count(self, extents: Ints, size_bytes: int) -> None:
        """Attribute bytes to origins; exact while all held extents have one origin, else by share of ranges."""
        with self._lock:
            self._count(extents, size_bytes)

    def count_of(self, held: HeldExtent, size_bytes: int) -> None:
        """Attribute bytes to the origin of one extent."""
        with self._lock:
            self._origin_bytes[ORIGINS[held.origin]] += size_bytes

    def origin_bytes(self) -> dict[str, int]:
        """Bytes read so far, by where they lay."""
        return dict(self._origin_bytes)

    def close(self) -> None:
        """Release every extent and the range. The caller has ended its reads and dropped its views."""
        with self._lock:
            self._closed = True
            self._uses.clear()
            self._drop(list(self.held))
        self._give_back()
        self.grants.close()
        self.range.close()

    def abandon(self) -> None:
        """In a forked child: close what was inherited and forget the rest; say nothing to anybody."""
        for held in self.held.values():
            if held.fd >= 0:
                os.close(held.fd)
        self.held.clear()
        self.range.forget()
        del self.grants

    # ---- inside

    def _count(self, extents: Ints, size_bytes: int) -> None:
        if self._one_origin is not None:
            self._origin_bytes[ORIGINS[self._one_origin]] += size_bytes
            return
        for extent, count in zip(*np.unique(extents, return_counts=True), strict=True):
            name = ORIGINS[self.held[int(extent)].origin]
            self._origin_bytes[name] += size_bytes * int(count) // len(extents)

    def _missing(self, extents: Sequence[int]) -> list[int]:
        missing = []
        for extent in extents:
            if extent in self.held:
                self.held.move_to_end(extent)
            else:
                missing.append(extent)
        return missing

    def _fetch(self, extents: Sequence[int]) -> list[int]:
        """Lease what this thread has said to be coming; returns what was refused even once all else was dropped."""
        try:
            refused = self._lease(extents)
            if refused:
                with self._lock:
                    self._pressed = True
                    self._drop(list(self.held))
                refused = self._lease(refused)
            return refused
        finally:
            self._give_back()

    def _lease(self, extents: Sequence[int]) -> list[int]:
        """Acquire; returns what was refused. What is owed goes back first: it may be the room that is needed."""
        self._give_back()
        if not extents:
            return []
        began, answers = time.perf_counter(), list[Granted | Refused]()
        try:
            answers = self.grants.acquire(extents, self._timeout_s)
            with self._lock:
                for answer in answers:
                    if isinstance(answer, Granted):
                        self._take(answer)
        finally:  # what cannot be had was waited for too
            self.stages.acquired(began, next((each for each in answers if isinstance(each, Granted)), None))
        return [answer.extent for answer in answers if not isinstance(answer, Granted)]

    def _take(self, granted: Granted) -> None:
        if self._closed:
            os.close(granted.fd)
            return
        holes = Holes(self._catalog.extent(granted.extent), granted.holes) if granted.holes else None
        held = HeldExtent(granted, holes)
        self.held[granted.extent] = held
        if granted.brief:
            self._brief.add(granted.extent)
        self._pressed |= granted.once
        origins = {entry.origin for entry in (held, *self._any_held())}
        self._one_origin = held.origin if len(origins) == 1 else None
        if granted.origin in MAPPABLE and holes is None and self._map(granted.extent, held):
            self._mapped_bytes += held.size_bytes
            self._unmapped -= 1
            # At once: after an interrupt in between, its number could be another file's.
            self.mapped[granted.extent], fd, held.fd = True, held.fd, -1
            os.close(fd)
        else:
            self.files += 1

    def _map(self, extent: int, held: HeldExtent) -> bool:
        """Whether it is mapped now; not where that is more than this process may map."""
        fits = self._mapped_bytes + held.size_bytes <= self._limit
        if not fits or held.offset % PAGE_BYTES or not held.size_bytes:
            return False
        try:
            self.range.map(int(self._starts[extent]), held.size_bytes, held.fd, held.offset)
        except OutOfSpace:
            return False
        return True

    def _any_held(self) -> list[HeldExtent]:
        """One held extent stands for all while they share an origin."""
        if self._one_origin is None:
            return list(self.held.values())
        return [next(iter(self.held.values()))]

    def _make_room(self, missing: Collection[int]) -> None:
        """Release the least recently used, when this many more would exceed a limit."""
        coming = int(self._sizes[list(missing)].sum())
        over_bytes = self._mapped_bytes + coming - self._limit
        over_files = self.files + len(missing) - MAX_FILES
        if over_bytes <= 0 and over_files <= 0:
            return
        busy, drop = self._busy(), list[int]()
        for extent, held in self.held.items():
            if extent in busy:
                continue
            if held.fd < 0 and over_bytes > 0:
                over_bytes -= held.size_bytes
                drop.append(extent)
            elif held.fd >= 0 and over_files > 0:
                over_files -= 1
                drop.append(extent)
        self._drop(drop)

    def _busy(self) -> set[int]:
        return {extent for use in self._uses for extent in use.looks_at()}

    def _drop(self, extents: Sequence[int]) -> None:
        """Unmap or close what no read looks at; it is owed to the holder from then on."""
        busy = self._busy() if extents else set()
        for extent in extents:
            if extent in busy:
                continue
            held = self.held.pop(extent)
            self._brief.discard(extent)
            self._recalled.discard(extent)
            if held.fd >= 0:
                os.close(held.fd)
                self.files -= 1
            else:
                self.mapped[extent] = False
                self._unmapped += 1
                self.range.unmap(int(self._starts[extent]), held.size_bytes)
                self._mapped_bytes -= held.size_bytes
            self._owed.append(extent)

    def _give_back(self) -> None:
        """Release what is owed; what another thread releases has been released too on return."""
        with self._giving:
            with self._lock:
                owed, self._owed = self._owed, []
            if owed:
                self.grants.release(owed)


def touched(first: Ints, last: Ints) -> list[int]:
    """Every extent that ranges touch, sorted; `first` and `last` as `ExtentReader.spans` gives them."""
    used = set(first.tolist())
    if last is not first:
        used.update(last.tolist())
        for at in np.flatnonzero(last - first > 1).tolist():
            used.update(range(first[at], last[at] + 1))
    return sorted(used)
