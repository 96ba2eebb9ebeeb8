"""Decides whether extents that no dataset declares displace those that were read before them, or one another.

A program that reads again what it read lately is served best by LRU. One that reads more than the cache holds, over and
over, is served best by keeping what is there: new extents are evicted first. Two lists of ids, without data, follow the one
rule and the other, and the list that hits more decides. This is dynamic insertion: Qureshi et al., "Adaptive Insertion
Policies for High Performance Caching", ISCA 2007.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from cachesvc.core.model import PART_BYTES, ExtentId, TierName
from cachesvc.core.records.residency import Copy, TierState

PASSED_SHARE = 0.05
"""The part of a tier in which new extents stay first, so that programs may read them piece by piece."""
KEPT_ONE_IN = 64
"""Where new extents are evicted first, one of so many is kept, so that what is kept follows the programs."""
MOST_SCORE = 16
"""Hits by which one list can be ahead of the other."""
MOST_IDS = 4096
"""Ids of each list; of more extents, a sample."""


class Admission:
    """Decides what new extents displace. One decision holds for all tiers of a node."""

    def __init__(self, tiers: Mapping[TierName, TierState]) -> None:
        self._tiers = tiers
        self._one_in = sum(tier.budget_bytes for tier in tiers.values()) // (MOST_IDS * PART_BYTES) + 1
        self._lru, self._scan = _Ids(evicts_newest=False), _Ids(evicts_newest=True)
        self._score = self._admitted = 0

    def read(self, copy: Copy) -> None:
        """Note that a copy is read whose extent no dataset declares. It is on its eviction list still, if on any."""
        again = copy.eviction_list in (copy.tier.lru, copy.tier.lru_unplanned)
        if copy.touched and not again:
            return  # it has not passed yet
        copy.passing = not again
        entry = copy.entry
        if int.from_bytes(entry.id[:4], "little") % self._one_in == 0:
            room_bytes = sum(tier.unused_bytes for tier in self._tiers.values()) // self._one_in
            by_lru = self._lru.read(entry.id, entry.size_bytes, room_bytes)
            by_scan = self._scan.read(entry.id, entry.size_bytes, room_bytes)
            self._score = max(-MOST_SCORE, min(MOST_SCORE, self._score + by_scan - by_lru))

    def end_passing(self, tier: TierState) -> None:
        """Move the oldest of a tier's passing copies, beyond their share, to where they are evicted."""
        while tier.passing.size_bytes > PASSED_SHARE * tier.budget_bytes:
            copy = next(iter(tier.passing))
            tier.passing.remove(copy)
            copy.passing = False
            self._admitted += 1
            displaces = self._score <= 0 or self._admitted % KEPT_ONE_IN == 0
            tier.lru_of(copy).add(copy, first=not displaces)


class _Ids:
    """The extents that a list of some bytes would hold, the first to be evicted first."""

    def __init__(self, evicts_newest: bool) -> None:
        self._evicts_newest = evicts_newest
        self._sizes: OrderedDict[ExtentId, int] = OrderedDict()
        self._size_bytes = self._read = 0

    def read(self, extent: ExtentId, size_bytes: int, room_bytes: int) -> bool:
        """Return whether an extent is there, and add it."""
        if extent in self._sizes:
            self._sizes.move_to_end(extent)
            return True
        while self._sizes and self._size_bytes + size_bytes > room_bytes:
            self._size_bytes -= self._sizes.popitem(last=False)[1]
        self._sizes[extent] = size_bytes
        self._size_bytes += size_bytes
        self._read += 1
        if self._evicts_newest and self._read % KEPT_ONE_IN:
            self._sizes.move_to_end(extent, last=False)
        return False
