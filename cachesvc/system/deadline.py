"""Pauses between the tries of a loop that polls, up to a deadline."""

from __future__ import annotations

import time


class Deadline:
    """The end of a wait, so many seconds from now."""

    def __init__(self, limit_s: float) -> None:
        self._began_at = time.monotonic()
        self._limit_s = limit_s

    @property
    def waited_s(self) -> float:
        """Seconds since the wait began."""
        return time.monotonic() - self._began_at

    def pause(self, pause_s: float) -> bool:
        """Sleep before another try. False, at once, where the deadline has passed."""
        if self.waited_s >= self._limit_s:
            return False
        time.sleep(pause_s)
        return True
