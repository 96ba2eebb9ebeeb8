"""Starts fills: of extents of the source, and of prepared extents.

A prepared extent is made from the samples of one source extent, by a preparer. Its fill first has its source extent
resident, then reserves its target. Both are one admission: what is reserved protects the source copy until the fill ends,
and nothing is held while the fill waits for anything. So fills never wait for each other in a circle. Where one finds no
room though no other prepared fill is under way, it is given up, and readers prepare the samples for themselves.

Where nodes share what they prepared, other nodes are asked for the extent first. One that another node has is fetched from
there, as an extent of the source would be.
"""

from __future__ import annotations

from enum import Enum

from cachesvc.core.commands import FindCopy
from cachesvc.core.events import CopyFound
from cachesvc.core.records.preparers import Preparers
from cachesvc.core.records.residency import Ahead, CacheEntry, Copy, Elsewhere
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.policy import Requester
from cachesvc.core.tiering.room import Placement


class Readiness(Enum):
    """Whether the fill of an extent may start."""

    NOW = 1
    WAITS = 2
    """It waits for a slot, for an idle preparer, or for its source extent."""
    NEVER = 3
    """Nothing is under way that would let it start."""


class FillStarts:
    """Starts fills that do not come from another tier."""

    def __init__(self, copies: Copies, preparers: Preparers) -> None:
        self._copies, self._preparers = copies, preparers
        self._policy = copies.policy

    def readiness(self, entry: CacheEntry) -> Readiness:
        """Return whether a fill may start now, but for its room. For a prepared extent this starts the fill of its source
        extent, so that it is resident by the time a preparer is idle."""
        if entry.made_from is None or entry.elsewhere is Elsewhere.YES:
            return Readiness.WAITS if self._copies.busy else Readiness.NOW
        if self._asks_others(entry):
            return Readiness.WAITS
        if not self._preparers.any_for(entry):
            return Readiness.NEVER
        source = self._copies.ensure_entry(*entry.made_from)
        if source.best() is None:
            return self._fetch(source, entry)
        return Readiness.NOW if self._preparers.idle_for(entry) is not None else Readiness.WAITS

    def has_preparer(self, entry: CacheEntry) -> bool:
        """Return whether an extent is not prepared, or some process can prepare it, or may have it."""
        asked = entry.elsewhere in (Elsewhere.ASKED, Elsewhere.YES)
        return entry.made_from is None or asked or self._preparers.any_for(entry)

    def found(self, event: CopyFound) -> None:
        """Note whether another node has a prepared extent."""
        entry = self._copies.entries.get(event.extent)
        if entry is not None:
            entry.elsewhere = Elsewhere.YES if event.found else Elsewhere.NO
            self._copies.forget(entry)

    def _asks_others(self, entry: CacheEntry) -> bool:
        """Return whether other nodes have been asked for a prepared extent, and have not answered."""
        if not self._policy.settings.share_prepared:
            return False
        if entry.elsewhere is Elsewhere.UNKNOWN:
            entry.elsewhere = Elsewhere.ASKED
            self._copies.context.emit(FindCopy(entry.id))
        return entry.elsewhere is Elsewhere.ASKED

    def start(
        self, entry: CacheEntry, requester: Requester, ahead_of: Ahead | None = None
    ) -> Placement | None:
        """Start a fill that is ready now. Return None where it started, else the placement that gives it no room yet."""
        if entry.made_from is None or entry.elsewhere is Elsewhere.YES:
            placement = self._policy.place(entry, requester)
            return None if self._copies.carry_out(placement, entry, ahead_of=ahead_of) else placement
        source, preparer = self._copies.ensure_entry(*entry.made_from).best(), self._preparers.idle_for(entry)
        assert source is not None and preparer is not None, "a fill that is not ready"  # noqa: PT018
        self._protect(source)
        placement = self._policy.place(entry, requester)
        started = self._copies.carry_out(placement, entry, source, ahead_of, preparer)
        self._unprotect(source)
        return None if started else placement

    def ends_without_readers(self, entry: CacheEntry) -> bool:
        """Return whether fills under way will leave room to a prepared extent that finds none."""
        return entry.made_from is not None and bool(self._preparers.working)

    def _fetch(self, source: CacheEntry, wanted_by: CacheEntry) -> Readiness:
        """Start the fill of a source extent. It is of no claim, so it takes room that nothing keeps."""
        if wanted_by not in source.wanted_by:
            source.wanted_by.append(wanted_by)
        if source.filling() or source.due_at is not None or source.queued or self._copies.busy:
            return Readiness.WAITS
        placement = self._policy.place(source, Requester.PLANNED_READER)
        if self._copies.carry_out(placement, source) or placement.room_coming or self._preparers.working:
            return Readiness.WAITS
        source.wanted_by.remove(wanted_by)
        self._copies.forget(source)
        return Readiness.NEVER

    def _protect(self, source: Copy) -> None:
        self._copies.unlist(source)
        source.fills_from += 1

    def _unprotect(self, source: Copy) -> None:
        source.fills_from -= 1
        self._copies.settle(source)
