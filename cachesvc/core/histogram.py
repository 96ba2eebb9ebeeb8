"""A histogram of waits: counts by fixed bounds, which add up over ranks, nodes and time."""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

BOUNDS_S = (0.001, 0.004, 0.016, 0.06, 0.25, 1.0, 4.0, 15.0, 60.0, 300.0)
"""Upper bounds of the buckets in seconds: from a wait that no step notices to one that ends a job. One more bucket has no
bound."""
BUCKETS = len(BOUNDS_S) + 1


def bucket_of(seconds: float) -> int:
    """Return the index of the bucket that counts a wait."""
    return bisect_left(BOUNDS_S, seconds)


@dataclass(slots=True)
class Histogram:
    """Counts of waits by bucket, each counted in one, and the sum of all waits in seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * BUCKETS)
    sum_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one wait."""
        self.counts[bucket_of(seconds)] += 1
        self.sum_s += seconds

    def __add__(self, more: Histogram) -> Histogram:
        return Histogram(list(map(operator.add, self.counts, more.counts)), self.sum_s + more.sum_s)

    def __sub__(self, before: Histogram) -> Histogram:
        return Histogram(list(map(operator.sub, self.counts, before.counts)), self.sum_s - before.sum_s)

    def add(self, counts: Sequence[int], sum_s: float) -> None:
        """Count waits that were counted elsewhere."""
        for bucket, count in enumerate(counts):
            self.counts[bucket] += count
        self.sum_s += sum_s
