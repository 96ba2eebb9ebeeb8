"""Weighted rendezvous hashing: an order of members for each extent.

Each pair of member and extent has a score, and the member with the highest score owns the extent (Thaler and Ravishankar,
"Using Name-Based Mappings to Increase Hit Rates", 1998). The score is -weight / ln(u), where u is a hash of the pair in
(0, 1), so a member owns extents in proportion to its weight (Schindelhauer and Schomaker, "Weighted Distributed Hash
Tables", 2005). When a member comes or goes, only the extents that it owns move. A score depends on no other member, so the
order of some members is their order among all.

The logarithms of two processors may differ in the last bit. Members whose scores differ by no more than that may change
places, once in some 10^14 extents, and the cost is a second fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from cachesvc.core.model import ExtentId

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]


BLOCK_SCORES = 1 << 18
"""Scores that are computed at once: 2 MiB of floats, which stay in a processor's cache."""


class Rendezvous:
    """The scores of some members. `weights` are positive; only their ratios matter."""

    def __init__(self, names: Sequence[str], weights: Sequence[float]) -> None:
        seeds = [int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") for name in names]
        self._seeds: U64 = np.array(seeds, np.uint64)
        self._weights: F64 = np.array(weights, np.float64)

    def ranks(self, extents: Sequence[ExtentId], count: int) -> I64:
        """The indices of the `count` best members of each extent, the best first: an array (extents, count), with fewer
        columns where there are fewer members. O(extents x members) time."""
        count = min(count, len(self._seeds))
        ranks: I64 = np.zeros((len(extents), count), np.int64)
        if not count:
            return ranks
        step = max(1, BLOCK_SCORES // len(self._seeds))
        for start in range(0, len(extents), step):
            scores = self._scores(extents[start : start + step])
            for column in range(count):
                best = np.argmax(scores, axis=1)
                ranks[start : start + step, column] = best
                scores[np.arange(len(scores)), best] = 0.0
        return ranks

    def _scores(self, extents: Sequence[ExtentId]) -> F64:
        halves = np.frombuffer(b"".join(extents), "<u8").reshape(len(extents), 2)
        mixed = _mix((halves[:, 0] ^ _mix(halves[:, 1]))[:, None] ^ self._seeds[None, :])
        uniform = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # exact, so neither 0 nor 1
        scores: F64 = self._weights / -np.log(uniform)
        return scores


def _mix(values: U64) -> U64:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014): a bijection that spreads every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = values ^ (values >> np.uint64(31))
    return mixed
