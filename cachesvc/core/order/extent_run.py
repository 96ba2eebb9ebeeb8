"""The run of an epoch: the extents that hold samples, in a random sequence, with their samples end to end.

Borders cut a run into regions, which `Deal.regions` gives: a part for each canonical node, then the tail. A rotated run is
a ring of extents that is opened at a uniformly chosen sample. So every sample is equally likely at each position, whatever
the sizes of extents: it is dropped, repeated and given to each node as often as any other. The extent in which the ring is
opened begins the run and ends it too. The samples of an extent that a border cuts are permuted. Otherwise a border would
keep neighbours together, and data is often sorted by class.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cachesvc.core.order.intervals import Intervals
from cachesvc.core.order.permute import I64, Network, Use, mix, mix_each, permute

_ROUNDS = 4
"""Rounds of the permutations inside extents. They separate neighbours and do no more: the samples of a block are permuted
again, and shares are even under any permutation."""


class PermutedEntries(NamedTuple):
    """Entries of a run whose samples are permuted, ascending. The samples of entry `entry[i]` begin at `first[i]`, and
    permutation i of the network permutes them. Two int64[n]. Entries of one extent have the same permutation."""

    entry: I64
    first: I64
    network: Network


class ExtentRun:
    """The run of one epoch, rotated if `borders` are given: positions from 0 to the number of samples. Immutable.

    Entry i of the run is the extent `extents[i]`, which begins at the position `first[i]`. The end of the last entry is
    appended to `first`. A rotated run has the extent of its first entry again as its last one. The first entry then begins
    before position 0, and the last one ends behind the run. The sample at a position p of entry i is p + `shift[i]`,
    permuted within the extent if the entry is in `cut`.
    """

    __slots__ = ("_key", "cut", "extents", "first", "shift")

    def __init__(
        self, extent_first: I64, seed: int, epoch: int, shuffle: bool, borders: I64 | None = None
    ) -> None:
        extents, offset = np.flatnonzero(np.diff(extent_first)), 0
        if shuffle and extents.size:
            key = mix(Use.EXTENTS, seed, epoch)
            extents = extents[permute(np.arange(extents.size), extents.size, key).astype(np.int64)]
        if borders is not None and extents.size:
            extents, offset = _opened(extents, extent_first, mix(Use.OFFSET, seed, epoch))
        ends = np.cumsum(extent_first[extents + 1] - extent_first[extents])
        self.extents = extents
        self.first = np.concatenate(([0], ends)).astype(np.int64) - offset
        self.shift = extent_first[extents] - self.first[:-1]
        self._key = mix(Use.INSIDE, seed, epoch)
        self.cut = self._permuted(np.empty(0, np.int64) if borders is None else self._cut_by(borders))

    def entries(self, begin: int, end: int) -> tuple[int, int]:
        """The entries [low, high) that have positions in [begin, end), which is not empty."""
        low, high = np.searchsorted(self.first, (begin + 1, end))
        return int(low) - 1, int(high)

    def samples(self, positions: I64, begin: int, end: int) -> I64:
        """The samples at `positions`, which lie in [begin, end): a search among few entries is fast. Overwrites
        `positions`."""
        low, high = self.entries(begin, end)
        entry = Intervals(self.first[low:high]).of(positions)
        positions += self.shift[low:high][entry]
        for row in range(*np.searchsorted(self.cut.entry, (low, high)).tolist()):
            inside = np.flatnonzero(entry == self.cut.entry[row] - low)
            start = self.cut.first[row]
            positions[inside] = (
                self.cut.network.alone(row).permute(positions[inside] - start).astype(np.int64) + start
            )
        return positions

    def permuted_samples(self, positions: I64) -> I64:
        """The samples at `positions` if all extents were permuted, not only the cut ones. Then every sample is equally
        likely at each position of a rotated run; where only cut extents are permuted, in each region."""
        entry, group = np.unique(np.searchsorted(self.first, positions, "right") - 1, return_inverse=True)
        permuted = self._permuted(entry)
        start = permuted.first[group]
        inside = positions + self.shift[entry][group] - start
        return permuted.network.permute(inside, group).astype(np.int64) + start

    def _permuted(self, entry: I64) -> PermutedEntries:
        sizes = (self.first[entry + 1] - self.first[entry]).astype(np.uint64)
        network = Network(sizes, mix_each(self._key, self.extents[entry]), _ROUNDS)
        return PermutedEntries(entry, self.first[entry] + self.shift[entry], network)

    def _cut_by(self, borders: I64) -> I64:
        """The entries that have one of the borders inside, ascending."""
        low = np.searchsorted(self.first, borders, side="right") - 1
        return np.unique(low[self.first[low] < borders])


def _opened(extents: I64, extent_first: I64, number: int) -> tuple[I64, int]:
    """The ring of `extents`, opened at a sample that a random `number` of 64 bits chooses: the entries of the run, and how
    many samples of the first one lie before position 0."""
    ends = np.cumsum(extent_first[extents + 1] - extent_first[extents])
    sample = number % int(ends[-1])
    begins = int(np.searchsorted(ends, sample, side="right"))
    offset = sample - (int(ends[begins - 1]) if begins else 0)
    return np.append(np.roll(extents, -begins), extents[begins]), offset
