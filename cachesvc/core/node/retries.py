"""Times of retries: backoff without randomness, and the retries that are due."""

from __future__ import annotations

import heapq
import math

from cachesvc.core.model import ExtentId

RETRY_BASE_S = 0.1
"""First delay: about a round trip to an object store, so a short fault costs no more than it lasted."""
RETRY_CAP_S = 10.0
"""Longest delay: readers wait for tens of seconds."""


def backoff_s(attempt: int, extent: ExtentId) -> float:
    """Seconds to wait after failed attempt number `attempt` (1 is the first).

    Doubles up to `RETRY_CAP_S`, times a factor in [1/2, 1) that depends on the extent's id. So retries of many extents are
    spread out, and the same events give the same trace.
    """
    whole = min(RETRY_CAP_S, RETRY_BASE_S * float(2 ** min(attempt - 1, 16)))
    return whole * (0.5 + int.from_bytes(extent[-2:], "little") / 131072)


class Alarms:
    """Due times of extents, earliest first. Setting one again adds a second; the caller ignores stale ones."""

    __slots__ = ("_heap",)

    def __init__(self) -> None:
        self._heap: list[tuple[float, ExtentId]] = []

    def set(self, due_at: float, extent: ExtentId) -> None:
        """Add a due time for `extent`."""
        heapq.heappush(self._heap, (due_at, extent))

    def next(self) -> float:
        """The earliest due time; inf where there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def ring(self, now: float) -> list[ExtentId]:
        """Remove and return every extent due by `now`."""
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[1])
        return due
