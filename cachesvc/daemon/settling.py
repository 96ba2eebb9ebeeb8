"""Who waits until what is done to a large dataset in steps is done: a claim, a pin, an eviction take seconds, between
other events."""

from __future__ import annotations

from collections.abc import Callable


class Settling:
    """As many wait as there are readers and calls. On the loop's thread."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []

    def add(self, done: Callable[[], bool], then: Callable[[], None]) -> None:
        """Call `then` when `done` is true; at once where it is."""
        self._waiting.append((done, then))
        self.tell()

    def tell(self) -> None:
        """Call whoever has waited long enough, in the order in which they came."""
        waiting, self._waiting = self._waiting, []
        for done, then in waiting:
            if done():
                then()
            else:
                self._waiting.append((done, then))
