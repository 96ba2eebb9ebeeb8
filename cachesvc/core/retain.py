"""Which part of a dataset is kept, where the order of the next epoch is known: a part that lies evenly in it.

Any part of one size hits equally often, but a random one leaves long runs of absent extents, and the source sees
them as peaks. So while an epoch passes, what it has done with changes places: a streamed extent is kept in the
stead of a kept one, when more is kept around the latter than around the former in the next order. Both are there
anyway, so this moves no byte; what is kept is as much as before, and nothing that this epoch still needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from cachesvc.core.model import ExtentId
from cachesvc.core.state import Copy, Entry
from cachesvc.core.table import Table

STRETCHES = 100
"""Parts of the next order that should keep alike: five in the 5 % of an epoch over which a rate is judged."""
AROUND = np.array([1, 2, 3, 4, 6, 4, 3, 2, 1], np.float64)
"""What one extent more does to the squared excess of its own stretch and of every five in a row that hold it."""
GAIN = 6.0
"""A change of places pays when the excesses differ by more: it takes as much away on one side as it adds there."""


class Retention:
    """Counts what is kept in each stretch of the next order, once `count` is done. An extent takes part once it was
    passed."""

    def __init__(self, following: Sequence[ExtentId]) -> None:
        self.following = following
        self._stretch: Table[int] = Table()
        self._counted: Table[bool] = Table()
        self._kept = np.zeros(STRETCHES)
        self._passed: list[list[Copy]] = [[] for _ in range(STRETCHES)]

    def count(self, kept: Callable[[ExtentId], bool], step: int) -> Iterator[None]:
        """Find out what is kept; gives way after each `step` extents."""
        stretch: Table[int] = Table()
        order: list[ExtentId] = []
        for start in range(0, len(self.following), step):
            for extent in self.following[start : start + step]:
                if extent not in stretch:
                    stretch[extent] = 0
                    order.append(extent)
            yield
        self.following = order
        for start in range(0, len(order), step):
            for at, extent in enumerate(order[start : start + step], start):
                stretch[extent] = at * STRETCHES // len(order)
                if kept(extent):
                    self._counted[extent] = True
                    self._kept[stretch[extent]] += 1
            yield
        self._stretch = stretch

    def passed(self, extent: ExtentId, kept: Copy | None) -> None:
        """The epoch is done with an extent: where a copy is kept, it may give its place away."""
        if extent not in self._stretch:
            return
        self._count(extent, kept is not None)
        if kept is not None:
            self._passed[self._stretch[extent]].append(kept)

    def instead_of(self, entry: Entry, may_go: Callable[[Copy], bool]) -> Copy | None:
        """An extent is to be fetched: the kept copy that should give its place to it, from where most is kept."""
        here = self._stretch.get(entry.id)
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
                    self._count(victim.entry.id, False)
                    self._count(entry.id, True)
                    return victim
        return None

    def end(self) -> Iterator[None]:
        """Give up what is counted, when nothing passes any more; gives way often."""
        yield from self._stretch.clear_in_parts()
        yield from self._counted.clear_in_parts()

    def _count(self, extent: ExtentId, kept: bool) -> None:
        if kept != (extent in self._counted):
            self._kept[self._stretch[extent]] += 1 if kept else -1
            if kept:
                self._counted[extent] = True
            else:
                self._counted.pop(extent)
