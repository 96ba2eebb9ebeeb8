"""The blocks of a shuffled run: windows of its extents, each permuted by its own key."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from cachesvc.core.order.extent_run import ExtentRun
from cachesvc.core.order.permute import I64, U64, Use, mix, mix_each


class Blocks(NamedTuple):
    """A block begins at each position in `first`, to which the run's end is appended. Each region that has positions begins
    with a block of `of_region`, and has a prefix of the keys of its blocks."""

    first: I64
    of_region: I64
    prefixes: U64

    def keys(self, blocks: I64) -> U64:
        """The keys of blocks."""
        region = np.searchsorted(self.of_region, blocks, side="right") - 1
        return mix_each(self.prefixes[region], blocks - self.of_region[region])

    def key(self, block: int) -> int:
        """The key of a block."""
        return int(self.keys(np.array([block], np.int64))[0])


def blocks_of(
    run: ExtentRun, regions: Iterable[tuple[int, int]], window: int, rotated: bool, seed: int, epoch: int
) -> Blocks:
    """Cut the regions of a run, from begin to end each, in blocks of `window` extents; 0 for all. The last region ends
    where the run does."""
    firsts, counts, prefixes, stop = [], [0], [], 0
    for region, (start, stop) in enumerate(regions):
        if start == stop:
            continue
        # A block is a window of the extents that lie in the region, at least in part. In a rotated run, the first block
        # also has the part of an extent that begins the region: so a ring of four extents is one block of four.
        low, high = run.entries(start, stop)
        low += int(rotated and run.begins[low] < start)
        firsts.append(np.append(start, run.first[low + (window or high) : high : window or 1]))
        counts.append(counts[-1] + firsts[-1].size)
        prefixes.append(mix(Use.BLOCK, seed, epoch, region))
    firsts.append(np.array([stop], np.int64))
    return Blocks(np.concatenate(firsts), np.array(counts[:-1], np.int64), np.array(prefixes, np.uint64))
