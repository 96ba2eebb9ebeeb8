"""Which part of a dataset is kept, where the order of the next epoch is known: a part that lies evenly in it.

Any part of one size hits equally often, but a random one leaves long runs of absent extents, and the source sees
them as peaks. So while an epoch passes, what it has done with changes places: a streamed extent is kept in the
stead of a kept one, when more is kept around the latter than around the former in the next order. Both are there
anyway, so this moves no byte; what is kept is as much as before, and nothing that this epoch still needs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from cachesvc.core.model import ExtentId
from cachesvc.core.state import Copy

STRETCHES = 100
"""Parts of the next order that should keep alike: five in the 5 % of an epoch over which a rate is judged."""
AROUND = np.array([1, 2, 3, 4, 6, 4, 3, 2, 1], np.float64)
"""What one extent more does to the squared excess of its own stretch and of every five in a row that hold it."""
GAIN = 6.0
"""A change of places pays when the excesses differ by more: it takes as much away on one side as it adds there."""


class Retention:
    """Counts what is kept in each stretch of the next order. An extent takes part once it was passed."""

    def __init__(self, following: Sequence[ExtentId], kept: Callable[[ExtentId], bool]) -> None:
        self.following = order = tuple(dict.fromkeys(following))
        stretches = STRETCHES
        self._stretch = {extent: at * stretches // len(order) for at, extent in enumerate(order)}
        self._counted = {extent for extent in order if kept(extent)}
        self._kept = np.zeros(stretches)
        for extent in self._counted:
            self._kept[self._stretch[extent]] += 1
        self._passed: list[list[Copy]] = [[] for _ in range(stretches)]

    def stays(self, copy: Copy) -> None:
        """A kept copy was passed: it may give its place away."""
        extent = copy.entry.id
        stretch = self._stretch.get(extent)
        if stretch is None:
            return
        if extent not in self._counted:  # there was room to keep it meanwhile
            self._counted.add(extent)
            self._kept[stretch] += 1
        self._passed[stretch].append(copy)

    def instead_of(self, copy: Copy, may_go: Callable[[Copy], bool]) -> Copy | None:
        """A streamed copy was passed: the kept one that should give way to it, from where most is kept."""
        here = self._stretch.get(copy.entry.id)
        if here is None:
            return None
        excess = np.convolve(self._kept - self._kept.mean(), AROUND, "same")
        for stretch in np.argsort(-excess).tolist():
            if excess[stretch] - excess[here] <= GAIN:
                return None
            passed: list[Copy] = self._passed[int(stretch)]
            while passed:
                victim = passed.pop()
                if may_go(victim) and victim.tier is copy.tier:
                    self._kept[stretch] -= 1
                    self._kept[here] += 1
                    self._counted.add(copy.entry.id)
                    self._passed[here].append(copy)
                    return victim
        return None
