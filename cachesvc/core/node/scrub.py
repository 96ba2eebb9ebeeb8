"""The background check of copies on disk: which copy to verify next, and when.

Copies are verified in turn, one at a time, at `bytes_per_s` on average: after each copy the scrub pauses for as long as its
bytes take at that rate. A tier's next round begins `ROUND_S` after the last one began, or when that one is over. Copies
that became resident meanwhile wait for it. RAM is left out: its bytes do not stay long enough to rot, and ECC checks them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from cachesvc.core.events import Verified
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.core.records.copy_phases import Phase
from cachesvc.core.records.residency import TierState
from cachesvc.core.tiering.copies import Copies

ROUND_S = 3600.0
"""Between the beginnings of two rounds: bits rot in months, so reading a small tier all the time is only a cost."""
EXAMINED = 64
"""Extents of a round examined in one step; those whose copy is gone are dropped from the round."""


@dataclass(slots=True)
class _Round:
    tier: TierState
    waiting: deque[ExtentId] = field(default_factory=deque)
    later: deque[ExtentId] = field(default_factory=deque)
    """Extents of the next round: those verified in this one, and those admitted since it began."""
    listed: set[ExtentId] = field(default_factory=set)
    """The extents in `waiting` and `later`."""
    began_at: float = -math.inf

    def due_at(self) -> float:
        """The time when a copy of this tier may be verified next."""
        if self.waiting:
            return -math.inf
        return self.began_at + ROUND_S if self.later else math.inf


class Scrub:
    """Each tier's round of copies, and the copy being verified. Tiers are scrubbed round robin."""

    def __init__(self, copies: Copies, bytes_per_s: int) -> None:
        self._copies = copies
        self._bytes_per_s = bytes_per_s
        tiers = copies.policy.tiers.values() if bytes_per_s else ()
        self._rounds = deque(_Round(tier) for tier in tiers if tier.name != RAM)
        self._due_at = 0.0
        self._size_bytes = 0
        self.checking: tuple[ExtentId, TierName] | None = None

    def admit(self, extents: Iterable[ExtentId], tier: TierName) -> None:
        """Verify copies that became resident in the next round."""
        for each in self._rounds:
            if each.tier.name == tier:
                new = [extent for extent in extents if extent not in each.listed]
                each.listed.update(new)
                each.later.extend(new)

    def next_deadline(self) -> float:
        """The time when the next copy is due; inf while there is none, or while one is being verified."""
        if self.checking is not None or not self._rounds:
            return math.inf
        return max(self._due_at, min(each.due_at() for each in self._rounds))

    def next(self, now: float) -> tuple[ExtentId, TierName] | None:
        """The copy to verify now; None where none is due."""
        if now < self.next_deadline():
            return None
        for _ in range(len(self._rounds)):
            self._rounds.rotate(-1)
            tier = self._rounds[-1].tier
            extent = self._pick(self._rounds[-1], now)
            if extent is not None:
                self.checking = extent, tier.name
                self._due_at = now + self._size_bytes / self._bytes_per_s
                return self.checking
        self._due_at = now + 1.0  # no copy can be verified now: wait before the next try
        return None

    def _pick(self, each: _Round, now: float) -> ExtentId | None:
        if each.tier.lost or each.due_at() > now:
            return None
        if not each.waiting:
            each.waiting, each.later, each.began_at = each.later, each.waiting, now
        for _ in range(min(EXAMINED, len(each.waiting))):
            extent = each.waiting.popleft()
            size_bytes = each.tier.dormant.get(extent)
            if size_bytes is None:
                copy = self._copies.find(extent, each.tier)
                if copy is None or copy.phase is not Phase.RESIDENT or copy.to_evict:
                    each.listed.remove(extent)
                    continue
                size_bytes = copy.entry.size_bytes if copy.committed else None
            each.later.append(extent)
            if size_bytes is not None:
                self._size_bytes = size_bytes
                return extent
        return None

    def verified(self, event: Verified) -> None:
        """End a check and count the bytes that it read, unless the check was given up meanwhile."""
        if self.checking == (event.extent, event.tier):
            self.checking = None
            if event.looked:
                self._copies.policy.tiers[event.tier].scrubbed_bytes += self._size_bytes

    def lost(self, tier: TierName) -> None:
        """Give up a check in a tier that is lost."""
        if self.checking is not None and self.checking[1] == tier:
            self.checking = None
