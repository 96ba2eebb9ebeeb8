"""Schedules: how far ahead of its cursor a plan may fetch, so that the source's rate over the epoch is as even as the
room for it allows.

N(step) is the number of absent bytes that a plan needs up to a step, a staircase. The bytes fetched up to a step have
two bounds. The lower one is N a few steps later, so that fills end in time; the upper one is N plus the room in bytes.
The shortest path through this band has the lowest peak of all that stay inside; it is the work-ahead smoothing of
stored video (Salehi, Zhang, Kurose, Towsley: "Supporting Stored Video", 1998). The schedule is a function of the
cursor, not of time: a job that never waits sees an even rate, and a job that waits is not paced (`lookahead.py`).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]

MAX_KNOTS = 2000
"""Points of the path: 100 in the 5 % of an epoch over which a rate is measured; a path costs 10 ms at most."""
LEAD_SHARE = 0.25
"""The part of the room that is kept full where the plan allows it: at least two of four fills run in it."""
RAMP_SHARE = 0.1
"""The part of the plan over which that lead is built up: built up at once, it would be a peak itself."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """`costs[i]`: bytes to fetch up to row i, inclusive. `path[k]`: bytes allowed at step k * `every`."""

    costs: I64
    path: Sequence[float]
    every: float

    def allows(self, index: int, step: int) -> bool:
        """Return whether row `index` may be fetched when everything before `step` is consumed."""
        at = min(step / self.every, len(self.path) - 1.0)
        low = int(at)
        high = min(low + 1, len(self.path) - 1)
        allowed = self.path[low] + (self.path[high] - self.path[low]) * (at - low)
        return int(self.costs[index]) <= allowed + 0.5


def schedule(steps: I64, costs: I64, room_bytes: int) -> Schedule:
    """The smoothest schedule for rows that are first needed at `steps` (ascending) and cost `costs` bytes each (0: kept),
    with at most `room_bytes` fetched ahead."""
    needed = np.cumsum(costs)
    total, last = float(needed[-1]), int(steps[-1]) + 1
    knots = min(MAX_KNOTS, last) + 1
    every = last / (knots - 1)
    grid: F64 = np.arange(knots, dtype=np.float64) * every
    lead: F64 = LEAD_SHARE * room_bytes * last / max(1.0, total) * np.minimum(1.0, grid / (RAMP_SHARE * last))
    upper = np.minimum(_needed_at(grid, steps, needed) + room_bytes, total)
    lower = np.minimum(_needed_at(grid + lead, steps, needed), upper)
    upper[-1] = lower[-1] = total
    path = _shortest(lower, upper)
    return Schedule(needed, path, every)


def _needed_at(grid: F64, steps: I64, needed: I64) -> F64:
    """Bytes needed once everything before each point of the grid is consumed."""
    count = np.searchsorted(steps, grid, side="right")
    return np.concatenate(([0], needed))[count].astype(np.float64)


def _shortest(lower: F64, upper: F64) -> list[float]:
    """The shortest path from the band's first lower point to its end: straight until a wall is in the way."""
    path = [float(lower[0])]
    while len(path) < len(lower):
        at, value = len(path) - 1, path[-1]
        bend, slope = _next_bend(lower[at + 1 :], upper[at + 1 :], value)
        path += [value + slope * step for step in range(1, bend + 1)]
    return path


def _next_bend(lower: F64, upper: F64, value: float) -> tuple[int, float]:
    """The number of knots that a line from `value` can go inside the band, and its slope."""
    steps = np.arange(1, len(lower) + 1)
    low, high = (lower - value) / steps, (upper - value) / steps
    least, most = np.maximum.accumulate(low), np.minimum.accumulate(high)
    apart = np.flatnonzero(least > most)
    if not len(apart):
        return len(lower), float(low[-1])
    wall = int(apart[0])
    # the line must bend at an earlier point of the side opposite to the wall that it would cross
    side = high if low[wall] > most[wall - 1] else low
    slope = most[wall - 1] if side is high else least[wall - 1]
    return int(np.flatnonzero(side[:wall] == slope)[-1]) + 1, float(slope)


class OpenBytes:
    """The most bytes of rows whose steps overlap: what has begun less what has ended, at each beginning."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._open_bytes = 0
        self._ends: list[int] = []
        """Heap of the last steps of the open rows."""
        self._ending_bytes: dict[int, int] = {}

    def add(self, size_bytes: int, first_step: int, last_step: int) -> None:
        """Add the next row, in the order of first steps."""
        while self._ends and self._ends[0] < first_step:
            self._open_bytes -= self._ending_bytes.pop(heapq.heappop(self._ends))
        if last_step not in self._ending_bytes:
            heapq.heappush(self._ends, last_step)
        self._ending_bytes[last_step] = self._ending_bytes.get(last_step, 0) + size_bytes
        self._open_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self._open_bytes)
