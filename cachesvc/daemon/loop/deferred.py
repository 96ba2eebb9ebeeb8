"""Callbacks that run when a condition holds.

A claim, a pin or an eviction of a large dataset is worked off in steps between other events, and takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable


class DeferredCallbacks:
    """The waiting callbacks, at most one for each reader and control call. Runs on the loop's thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def add(self, condition: Callable[[], bool], then: Callable[[], None]) -> None:
        """Call `then` once, when `condition()` is true; at once where it already is."""
        self._waiting.append((condition, then))
        self.run_due()

    def run_due(self) -> None:
        """Run the callbacks whose conditions hold, in the order in which they were added."""
        waiting, self._waiting = self._waiting, []
        for condition, then in waiting:
            if condition():
                then()
            else:
                self._waiting.append((condition, then))
