"""Which part of a dataset is kept, where the order of the next epoch is known: a part that lies evenly in it.

Any part of one size hits equally often, but a random one leaves long runs of absent extents, and the source sees
them as peaks. So while an epoch passes, what it has done with changes places: a streamed extent is kept in the
stead of a kept one, when more is kept around the latter than around the former in the next order. Both are there
anyway, so this moves no byte; what is kept is as much as before, and nothing that this epoch still needs.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cachesvc.core.model import ExtentId
from cachesvc.core.records.cache_entry import CacheEntry, Copy

STRETCHES = 100
"""Parts of the next order that should keep alike: five in the 5 % of an epoch over which a rate is judged."""
AROUND = np.array([1, 2, 3, 4, 6, 4, 3, 2, 1], np.float64)
"""What one extent more does to the squared excess of its own stretch and of every five in a row that hold it."""
GAIN = 6.0
"""A change of places pays when the excesses differ by more: it takes as much away on one side as it adds there."""


class Retention:
    """Counts what is kept in each stretch of the next order, once `count` is done. An extent takes part once it was
    passed. One that the order names again lies where it comes first."""

    def __init__(self, following: Sequence[ExtentId]) -> None:
        self.following = following
        self._ranks: dict[ExtentId, int] = {}
        """Of each extent among those of the order, when all are counted."""
        self._counting: dict[ExtentId, int] = {}
        self._extents = 0
        self._counted: set[ExtentId] = set()
        self._kept = np.zeros(STRETCHES)
        self._passed: list[list[Copy]] = [[] for _ in range(STRETCHES)]

    def count(self, kept: Callable[[ExtentId], bool], step: int) -> Iterator[None]:
        """Find out what is kept; gives way after each `step` extents."""
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
        """The epoch is done with an extent: where a copy is kept, it may give its place away."""
        stretch = self.stretch(extent)
        if stretch is None:
            return
        self._count(extent, stretch, kept is not None)
        if kept is not None:
            self._passed[stretch].append(kept)

    def instead_of(self, entry: CacheEntry, may_go: Callable[[Copy], bool]) -> Copy | None:
        """An extent is to be fetched: the kept copy that should give its place to it, from where most is kept."""
        here = self.stretch(entry.id)
        if here is None or entry.id in self._counted:
            return None
        excess = np.convolve(self._kept - self._kept.mean(), AROUND, "same")
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
        """In which part of the next order an extent lies; None where in none, or that is not known yet."""
        rank = self._ranks.get(extent)
        return None if rank is None else rank * STRETCHES // self._extents

    def _count(self, extent: ExtentId, stretch: int, kept: bool) -> None:
        if kept != (extent in self._counted):
            self._kept[stretch] += 1 if kept else -1
            if kept:
                self._counted.add(extent)
            else:
                self._counted.discard(extent)
