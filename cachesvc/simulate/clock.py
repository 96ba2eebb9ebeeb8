"""A virtual clock that jumps from event to event, in a fixed order."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class Clock:
    """Virtual seconds. Actions that are due at the same time run in the order in which they were added."""

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._number = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` when `delay_s` have passed."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), self._number, action))

    def step(self) -> bool:
        """Jump to the next action and run it; False where there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True
