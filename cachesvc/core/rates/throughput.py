"""Throughput over time, from counters that are read every few seconds."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import pairwise

STEP_S = 5.0
"""The interval of samples: short enough to see a stall, long enough to be no load."""
STEPS = 120
"""Samples that are kept: ten minutes."""
LATEST_STEPS = 2
"""The latest rate is that of so many steps: fills end in bursts."""


class ThroughputHistory:
    """Rates of counters that only grow. Times are seconds of a clock that does not go back."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, tuple[float, ...]]] = deque(maxlen=STEPS + 1)

    def next_deadline(self) -> float:
        """The time at which `add` is due; 0 at the beginning."""
        return self._samples[-1][0] + STEP_S if self._samples else 0.0

    def add(self, now: float, totals: Sequence[float]) -> None:
        """Add a sample of all counters."""
        self._samples.append((now, tuple(totals)))

    def latest(self, now: float, totals: Sequence[float]) -> tuple[float, ...]:
        """The rates of the last seconds, up to `totals` now; zeros before the first sample."""
        if not self._samples:
            return (0.0,) * len(totals)
        since, before = self._samples[-min(LATEST_STEPS, len(self._samples))]
        return _rates(before, totals, now - since)

    def rates(self) -> list[tuple[float, ...]]:
        """The rates of each step, oldest first."""
        samples = list(self._samples)
        return [_rates(before, after, until - since) for (since, before), (until, after) in pairwise(samples)]


def _rates(before: Sequence[float], after: Sequence[float], elapsed_s: float) -> tuple[float, ...]:
    return tuple(max(0.0, new - old) / max(elapsed_s, 1e-3) for old, new in zip(before, after, strict=True))
