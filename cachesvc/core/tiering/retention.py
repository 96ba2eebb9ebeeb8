"""Decides which part of a dataset is kept, where the order of the next epoch is known: a part spread evenly over that
order.

Any part of one size hits equally often, but a random part leaves long runs of absent extents, which the source sees as
peaks. So while an epoch passes, a streamed extent replaces a kept one that the epoch is done with, if more extents are
kept around the kept one than around the streamed one in the next order. Both are in the cache anyway, so this moves no
byte. As much is kept as before, and nothing is evicted that this epoch still needs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cachesvc.core.model import ExtentId
from cachesvc.core.records.residency import CacheEntry, Copy

STRETCHES = 100
"""Parts of the next order that should keep equally much: five in the 5 % of an epoch over which a rate is measured."""
EXCESS_WEIGHTS = np.array([1, 2, 3, 4, 6, 4, 3, 2, 1], np.float64)
"""Weights of the stretches around an extent: what one extent more adds to the squared excess of its own stretch and of
each run of five that holds it."""
GAIN = 6.0
"""A trade pays when the excesses differ by more than it changes them."""


class Retention:
    """Counts what is kept in each stretch of the next order, once `count` is done. An extent takes part once the epoch has
    passed it. An extent that the order names twice counts at its first place."""

    def __init__(self, following: Sequence[ExtentId]) -> None:
        self.following = following
        self._ranks: dict[ExtentId, int] = {}
        """The rank of each extent in the order, once all are counted."""
        self._counting: dict[ExtentId, int] = {}
        self._extents = 0
        self._counted: set[ExtentId] = set()
        self._kept = np.zeros(STRETCHES)
        self._passed: list[list[Copy]] = [[] for _ in range(STRETCHES)]

    def count(self, kept: Callable[[ExtentId], bool], step: int) -> Iterator[None]:
        """Count what is kept; yields after each `step` extents."""
        ranks, kept_ranks = self._counting, array("Q")
        for start in range(0, len(self.following), step):
            for extent in self.following[start : start + step]:
                if extent in ranks:
                    continue
                rank = ranks[extent] = self._extents
                self._extents += 1
                if kept(extent):
                    self._counted.add(extent)
                    kept_ranks.append(rank)
            yield
        stretches = np.array(kept_ranks, np.int64) * STRETCHES // max(1, self._extents)
        self._kept += np.bincount(stretches, minlength=STRETCHES)
        self._ranks, self._counting = ranks, self._ranks

    def passed(self, extent: ExtentId, kept: Copy | None) -> None:
        """Note that the epoch is done with an extent. Its kept copy, if any, may be replaced."""
        stretch = self.stretch(extent)
        if stretch is None:
            return
        self._count(extent, stretch, kept is not None)
        if kept is not None:
            self._passed[stretch].append(kept)

    def choose_victim(self, entry: CacheEntry, may_go: Callable[[Copy], bool]) -> Copy | None:
        """The kept copy to evict for an extent that is to be fetched, from the stretch where most is kept; None where that
        does not pay."""
        here = self.stretch(entry.id)
        if here is None or entry.id in self._counted:
            return None
        excess = np.convolve(self._kept - self._kept.mean(), EXCESS_WEIGHTS, "same")
        for stretch in np.argsort(-excess).tolist():
            if excess[stretch] - excess[here] <= GAIN:
                return None
            passed: list[Copy] = self._passed[int(stretch)]
            while passed:
                victim = passed.pop()
                if may_go(victim) and victim.entry.size_bytes >= entry.size_bytes:
                    self._count(victim.entry.id, int(stretch), False)
                    self._count(entry.id, here, True)
                    return victim
        return None

    def end(self, step: int) -> Iterator[None]:
        """Free the counts once no plan passes extents any more; yields after each `step` extents."""
        for counted in (self._ranks, self._counting, self._counted):
            while counted:
                for _ in range(min(step, len(counted))):
                    counted.pop() if isinstance(counted, set) else counted.popitem()
                yield
        for passed in self._passed:
            passed.clear()
            yield

    def stretch(self, extent: ExtentId) -> int | None:
        """The stretch of the next order that holds an extent; None where none does, or the order is not counted yet."""
        rank = self._ranks.get(extent)
        return None if rank is None else rank * STRETCHES // self._extents

    def _count(self, extent: ExtentId, stretch: int, kept: bool) -> None:
        if kept != (extent in self._counted):
            self._kept[stretch] += 1 if kept else -1
            if kept:
                self._counted.add(extent)
            else:
                self._counted.discard(extent)
