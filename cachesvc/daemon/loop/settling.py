"""Callbacks for the end of what is done to a large dataset in steps: a claim, a pin or an eviction takes seconds, between
other events."""

from __future__ import annotations

from collections.abc import Callable


class Settling:
    """Who waits, at most as many as there are readers and calls. Used on the loop's thread alone."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def add(self, done: Callable[[], bool], then: Callable[[], None]) -> None:
        """Call `then` when `done` is true; at once where it is."""
        self._waiting.append((done, then))
        self.tell()

    def tell(self) -> None:
        """Call those whose work is done, in the order in which they came."""
        waiting, self._waiting = self._waiting, []
        for done, then in waiting:
            if done():
                then()
            else:
                self._waiting.append((done, then))
