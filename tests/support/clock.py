"""A virtual clock."""

from __future__ import annotations


class Clock:
    """Clock that moves only by `sleep`."""

    def __init__(self) -> None:
        self.now = 0.0

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def __call__(self) -> float:
        return self.now
