"""The run of an epoch: the extents that hold samples, in a random sequence, with their samples end to end.

Borders cut a run into regions, which `Assignment.regions` gives: a part for each canonical node, then the tail. A
rotated run is a ring of extents that is opened at a uniformly chosen sample. So every sample is equally likely at each
position, whatever the sizes of extents: it is dropped, repeated and given to each node as often as any other. The
extent in which the ring is opened begins the run and ends it too. The samples of an extent that a border cuts are
permuted. Otherwise a border would keep neighbours together, and data is often sorted by class.

Where each canonical node has extents of its own (`homes.py`), the run has one such ring for each of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from cachesvc.core.order.intervals import Intervals
from cachesvc.core.order.permute import I64, Network, Use, distinct, mix, mix_each, permute

_ROUNDS = 4
"""Rounds of the permutations inside extents. They separate neighbours and do no more: the samples of a block are permuted
again, and shares are even under any permutation."""


class CutExtents(NamedTuple):
    """The extents of a run whose samples are permuted. Permutation `row[i]` is that of entry i of the run, -1 for none,
    int64[entries]. The extent of permutation k has the samples from `first[k]` on, int64[n]."""

    row: I64
    first: I64
    network: Network


class ExtentRun:
    """The run of one epoch, rotated if `borders` are given: positions from 0 to the number of samples. Immutable.

    Entry i of the run is the extent `extents[i]`, whose positions begin at `first[i]`. The end of the last entry is
    appended to `first`. A rotated ring has the extent of its first entry again as its last one. The first entry then has
    samples before the ring, and the last one behind it: `begins[i]` is where the first sample of entry i would be. The
    sample at a position p of entry i is p + `shift[i]`, permuted within the extent where a border cuts it. `rings`: the
    extents of each ring; all extents are one without it.
    """

    __slots__ = ("_extent_first", "_key", "begins", "cut", "extents", "first")

    def __init__(
        self,
        extent_first: I64,
        seed: int,
        epoch: int,
        shuffle: bool,
        borders: I64 | None = None,
        rings: Sequence[I64] = (),
    ) -> None:
        self._extent_first, self._key = extent_first, mix(Use.INSIDE, seed, epoch)
        sizes, start = np.diff(extent_first), 0
        extents, begins, firsts, outer = [], [], [], [0]
        for number, ring in enumerate(rings or [np.flatnonzero(sizes)]):
            key = (seed, epoch, number) if rings else (seed, epoch)
            if shuffle and ring.size:
                permuted = permute(np.arange(ring.size), ring.size, mix(Use.EXTENTS, *key))
                ring = ring[permuted.view(np.int64)]
            edges = np.concatenate(([0], np.cumsum(sizes[ring])))
            total = int(edges[-1])
            if borders is not None and ring.size:
                at, opened = _opened(edges, mix(Use.OFFSET, *key))
                ring = np.concatenate((ring[at:], ring[: at + 1]))
                edges = np.concatenate((edges[at:-1], edges[: at + 2] + total)) - opened
            edges += start
            extents.append(ring)
            begins.append(edges[:-1])
            # Positions before a ring belong to the one before it.
            firsts.append(np.maximum(edges, start) if start else edges)
            outer += [outer[-1] + ring.size]
            start += total
        if len(firsts) == 1:
            ((self.extents,), (self.begins,), (self.first,)) = extents, begins, firsts
        else:
            self.extents, self.begins = np.concatenate(extents), np.concatenate(begins)
            self.first = np.concatenate([*(each[:-1] for each in firsts), firsts[-1][-1:]])
        ends = [each for low, high in pairwise(outer) if low < high for each in (low, high - 1)]
        self.cut = self._cut_by(
            np.empty(0, np.int64) if borders is None else borders, np.array(ends, np.int64)
        )

    @property
    def shift(self) -> I64:
        """The number that is added to the positions of each entry, to give samples. O(extents)."""
        return self._shifts(self.extents, self.begins)

    def _shifts(self, extents: I64, begins: I64) -> I64:
        found: I64 = self._extent_first[extents] - begins
        return found

    def entries(self, begin: int, end: int) -> tuple[int, int]:
        """The entries [low, high) that have positions in [begin, end), which is not empty."""
        low, high = np.searchsorted(self.first, (begin + 1, end))
        return int(low) - 1, int(high)

    def samples(self, positions: I64, begin: int, end: int) -> I64:
        """The samples at `positions`, which lie in [begin, end): a search among few entries is fast. Overwrites
        `positions`."""
        low, high = self.entries(begin, end)
        entry = Intervals(self.first[low:high]).of(positions)
        positions += self._shifts(self.extents[low:high], self.begins[low:high])[entry]
        row = self.cut.row[low:high]
        if row.max() < 0:
            return positions
        row = row[entry]
        inside = np.flatnonzero(row >= 0)
        positions[inside] = _permuted(self.cut.first, self.cut.network, positions[inside], row[inside])
        return positions

    def permuted_samples(self, positions: I64) -> I64:
        """The samples at `positions` if all extents were permuted, not only the cut ones. Then every sample is equally
        likely at each position of a rotated run; where only cut extents are permuted, in each region."""
        entry = np.searchsorted(self.first, positions, side="right") - 1
        extents, row = np.unique(self.extents[entry], return_inverse=True)
        return _permuted(
            *self._permutations(extents),
            positions + self._shifts(self.extents[entry], self.begins[entry]),
            row,
        )

    def position(self, sample: int) -> int:
        """The position of a sample: the inverse of `samples`. O(extents)."""
        extent = int(np.searchsorted(self._extent_first, sample, side="right")) - 1
        for entry in np.flatnonzero(
            self.extents == extent
        ).tolist():  # two where the run is opened in the extent
            row, image = int(self.cut.row[entry]), sample
            if row >= 0:
                first = int(self.cut.first[row])
                image = first + self.cut.network.inverse(sample - first, row)
            position = image - int(self._extent_first[extent]) + int(self.begins[entry])
            if (
                max(0, int(self.first[entry]))
                <= position
                < min(int(self.first[entry + 1]), self._extent_first[-1])
            ):
                return position
        raise AssertionError(f"sample {sample} of {self._extent_first[-1]}")

    def _permutations(self, extents: I64) -> tuple[I64, Network]:
        """The first sample of each of these extents, and the permutations of their samples."""
        first = self._extent_first[extents]
        sizes = (self._extent_first[extents + 1] - first).astype(np.uint64)
        return first, Network(sizes, mix_each(self._key, extents), _ROUNDS)

    def _cut_by(self, borders: I64, ends: I64) -> CutExtents:
        """The extents that have one of the borders inside. `ends`: the first and the last entry of each ring."""
        row = np.full(self.extents.size, -1, np.int64)
        if not self.extents.size:
            return CutExtents(row, *self._permutations(self.extents))
        entry = np.minimum(np.searchsorted(self.first, borders, side="right") - 1, self.extents.size - 1)
        cut = distinct(self.extents[entry[self.begins[entry] < borders]])
        # The ends of a ring are one extent.
        entry = np.concatenate((entry, ends)) if cut.size else entry
        of_entry = np.searchsorted(cut, self.extents[entry])
        row[entry] = np.where(np.append(cut, -1)[of_entry] == self.extents[entry], of_entry, -1)
        return CutExtents(row, *self._permutations(cut))


def _permuted(first: I64, network: Network, samples: I64, row: I64) -> I64:
    """The image of each sample under permutation `row[i]` of the network, whose extent begins at `first[row[i]]`."""
    alone = first.size == 1  # without groups, a permutation takes half the time
    start = first if alone else first[row]
    images = network.permute(samples - start, None if alone else row).view(np.int64)
    images += start
    return images


def _opened(edges: I64, number: int) -> tuple[int, int]:
    """Open a ring of extents, between these edges, at a sample that a random `number` of 64 bits chooses. Returns the first
    entry of the run, and the sample."""
    sample = number % int(edges[-1])
    return int(np.searchsorted(edges, sample, side="right")) - 1, sample
