"""Leases of extents: acquired when a read needs them, kept while there is room, released when no read needs them.

Two locks, each held briefly. `_lock` guards `held` and `_reads`. `_release_lock` is held while dropped extents are
released: the release of an extent precedes its next lease. `Grants.acquire` runs without a lock and may take minutes;
its extents are `_requested` meanwhile, and only reads that need one of those wait for it. A mapping is removed only
while no read needs it: a read registers with `begin` before it checks which of its extents are held.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.failover import RoomWait
from cachesvc.client.protocol import Granted, Grants, Refused
from loader.reading.active_reads import ActiveRead, Ints, touched
from loader.reading.held_extents import HeldExtent, HeldExtents
from loader.reading.wait_clock import WaitClock

_NO_EXTENTS: Ints = np.empty(0, np.int64)


class Leases:
    """The extents of one dataset that are leased through `grants`. Safe to share between threads."""

    def __init__(self, catalog: Catalog, grants: Grants, mapped_bytes: int, timeout_s: float) -> None:
        """Maps at most `mapped_bytes`; one request for extents may take `timeout_s`."""
        self.grants = grants
        self.wait_clock = WaitClock()
        self.held = HeldExtents(catalog, mapped_bytes)
        self.pinned = False
        """Views of the address range were given out, so every extent stays mapped until `close`."""
        self._extents, self._timeout_s = len(catalog.extent_starts), timeout_s
        self._reads = set[ActiveRead]()
        self._streaming: set[int] = set()
        self._recalled: set[int] = set()
        """Extents to release that are requested, or that a read needs."""
        self._room_is_short = False
        """Room was refused, or granted for one read: the next read to end releases all streaming extents."""
        self._dropped: list[int] = []
        """Extents no longer held whose release has yet to be sent."""
        # Lock this, not the Condition: its `with` runs Python code, in which an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._arrived = threading.Condition(self._lock)
        self._requested: set[int] = set()
        self._release_lock = threading.Lock()
        self._closed = False
        self._room = RoomWait(timeout_s)

    # ---- reads in flight

    def begin(self, first: Ints, last: Ints) -> tuple[ActiveRead, bool]:
        """Begin a read of ranges over extents; True when all of them are mapped, so that it needs no `ensure`."""
        read = ActiveRead(first, last)
        with self._lock:
            self._reads.add(read)
            ready = self.held.all_mapped(first, last)
            if not ready:
                read.extents = frozenset()  # nothing yet: `ensure` says what, part by part
        return read, ready

    def end(self, read: ActiveRead, size_bytes: int = 0) -> None:
        """End a read, and count `size_bytes` that `count` has not counted. Release streaming extents other than the ones
        that this read needs; where room was refused, those too, since this reader may be idle while others wait."""
        with self._lock:
            self._reads.discard(read)
            if size_bytes:
                self.held.count_bytes(read.first, size_bytes)
            if not (self._streaming or self._recalled):
                return
            used = set() if self._room_is_short else set(touched(read.first, read.last))
            self._room_is_short = False
            self._drop(list(self._streaming - used | self._recalled & self.held.by_index.keys()))
        if self._dropped:
            self._release_dropped()

    @contextmanager
    def holding_all(self) -> Iterator[None]:
        """Keep every extent that is leased meanwhile. If all are mapped at the end they are `pinned`; otherwise every
        extent is released."""
        everything = np.arange(self._extents)
        read = ActiveRead(everything, everything)
        with self._lock:
            self._reads.add(read)
        try:
            yield
        finally:
            with self._lock:
                self.pinned = bool(self.held.mapped.all())
                if self.pinned:
                    self.held.range.leave_to_children()
                else:
                    self._reads.discard(read)
                    self._drop(list(self.held.by_index))
            self._release_dropped()

    def ensure(self, read: ActiveRead, extents: Sequence[int]) -> bool:
        """Lease the extents that are not held, and let `read` need these extents alone from now on. False when some
        were refused even after this reader released every extent that no read needs. Raises as `Grants.acquire`."""
        needed = frozenset(extents)
        while True:
            mine: list[int] = []
            try:
                with self._lock:
                    read.extents = needed
                    missing = self.held.missing(extents)
                    mine = [extent for extent in missing if extent not in self._requested]
                    if missing and not mine:
                        began = time.perf_counter()
                        self._arrived.wait()  # the requesting thread ends within `timeout_s`
                        self.wait_clock.acquired(began, None)
                        continue
                    self._requested.update(mine)
                    if mine:
                        self._make_room(self._requested)
                if not missing:
                    return True
                if self._lease(mine):
                    with self._lock:
                        read.extents = frozenset()  # while it waits, another may take the room
                    return False
            finally:  # after an interrupt, too: no thread may wait for a request that has ended
                if mine:
                    with self._lock:
                        self._requested.difference_update(mine)
                        self._arrived.notify_all()

    def await_room(self, read: ActiveRead, extents: Sequence[int]) -> None:
        """Lease the extents of one sample, once the daemon has room where direct reads are not possible. The first long
        wait is logged. Raises OutOfSpace, and as `ensure`."""
        self._room.until(
            lambda: self.ensure(read, extents),
            f"no room for the {len(extents)} extents of one sample, and reading directly is off; give the daemon more "
            "--ram or --nvme, or allow direct reads with CACHESVC=auto",
        )

    # ---- releases

    def release_unused_mappings(self) -> None:
        """Release the mapped extents that no read needs."""
        with self._lock:
            self._drop([extent for extent, held in self.held.by_index.items() if held.fd < 0])
        self._release_dropped()

    def release_when_unused(self, extents: Iterable[int]) -> None:
        """Release the held ones of these extents, now or when the last read that needs them has ended."""
        with self._lock:
            # The grant of a requested extent may have been sent before this recall, and arrive after it.
            known = (each for each in extents if each in self.held.by_index or each in self._requested)
            self._recalled.update(known)
            self._drop(list(self._recalled & self.held.by_index.keys()))
        self._release_dropped()

    def discard(self, read: ActiveRead, wrong: Mapping[int, HeldExtent]) -> bool:
        """Drop wrong copies, so that `ensure` leases these extents anew; `read` needs nothing until then. False while
        another read needs one of them."""
        with self._lock:
            read.extents, held = frozenset(), self.held.by_index
            self._drop([extent for extent, copy in wrong.items() if held.get(extent) is copy])
            return not any(held.get(extent) is copy for extent, copy in wrong.items())

    @contextmanager
    def open_files(self, extents: Iterable[int]) -> Iterator[dict[int, HeldExtent]]:
        """Those of `extents` that are held as open descriptors; none of them is closed meanwhile."""
        read = ActiveRead(_NO_EXTENTS, _NO_EXTENTS)
        with self._lock:
            table = self.held.by_index
            held = {extent: table[extent] for extent in extents if extent in table}
            files = {extent: each for extent, each in held.items() if each.fd >= 0}
            read.extents = frozenset(files)
            self._reads.add(read)
        try:
            yield files
        finally:
            with self._lock:
                self._reads.discard(read)

    def count(self, extents: Ints, size_bytes: int) -> None:
        """See `HeldExtents.count_bytes`."""
        with self._lock:
            self.held.count_bytes(extents, size_bytes)

    def count_origins(self, sizes: Iterable[tuple[int, int]]) -> None:
        """See `HeldExtents.count_origins`."""
        with self._lock:
            self.held.count_origins(sizes)

    def close(self) -> None:
        """Release every extent and the address range. The caller has ended its reads and dropped its views."""
        with self._lock:
            self._closed = True
            self._reads.clear()
            self._drop(list(self.held.by_index))
        self._release_dropped()
        self.grants.close()
        self.held.range.close()

    def abandon(self) -> None:
        """Close inherited descriptors in a forked child, and send nothing."""
        self.held.abandon()
        del self.grants

    # ---- inside

    def _lease(self, extents: Sequence[int]) -> list[int]:
        """Acquire requested extents; returns the ones that were refused even after every unused extent was released."""
        try:
            refused = self._acquire(extents)
            if refused:
                with self._lock:
                    self._room_is_short = True
                    self._drop(list(self.held.by_index))
                refused = self._acquire(refused)
            return refused
        finally:
            self._release_dropped()

    def _acquire(self, extents: Sequence[int]) -> list[int]:
        """Acquire extents; returns the refused ones. Dropped extents are released first: they may be the room needed."""
        self._release_dropped()
        if not extents:
            return []
        began, answers = time.perf_counter(), list[Granted | Refused]()
        try:
            answers = self.grants.acquire(extents, self._timeout_s)
            with self._lock:
                for answer in answers:
                    if isinstance(answer, Granted):
                        self._add(answer)
        finally:  # a request that fails has waited, too
            granted = next((each for each in answers if isinstance(each, Granted)), None)
            self.wait_clock.acquired(began, granted)
        return [answer.extent for answer in answers if not isinstance(answer, Granted)]

    def _add(self, granted: Granted) -> None:
        if self._closed:
            os.close(granted.fd)
            return
        self.held.add(granted)
        if granted.brief:
            self._streaming.add(granted.extent)
        self._room_is_short |= granted.once
        self.held.map(granted.extent)

    def _make_room(self, coming: Collection[int]) -> None:
        """Drop least recently used extents where these more would exceed a limit."""
        excess_bytes, excess_files = self.held.excess(coming)
        if excess_bytes > 0 or excess_files > 0:
            self._drop(self.held.least_recently_used(excess_bytes, excess_files, self._needed()))

    def _drop(self, extents: Sequence[int]) -> None:
        """Remove the extents that no read needs; `_release_dropped` releases them."""
        needed = self._needed() if extents else set()
        for extent in extents:
            if extent in needed:
                continue
            self._streaming.discard(extent)
            self._recalled.discard(extent)
            self.held.remove(extent)
            self._dropped.append(extent)

    def _needed(self) -> set[int]:
        """The extents that some read needs."""
        return {extent for read in self._reads for extent in read.needs()}

    def _release_dropped(self) -> None:
        """Release dropped extents; on return, those that another thread was releasing are released, too."""
        with self._release_lock:
            with self._lock:
                dropped, self._dropped = self._dropped, []
            if dropped:
                self.grants.release(dropped)
