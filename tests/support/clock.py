"""A clock that moves only when it is told to."""

from __future__ import annotations


class Clock:
    """Moves only when somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now
