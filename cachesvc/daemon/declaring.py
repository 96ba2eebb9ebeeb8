"""Who waits until a dataset's claim has been taken up: a large one takes seconds, between other events."""

from __future__ import annotations

from collections.abc import Callable

from cachesvc.core.model import DatasetId


class Declaring:
    """As many wait as there are readers and calls: each has its one claim. On the loop's thread."""

    def __init__(self, claimed: Callable[[DatasetId], bool]) -> None:
        self._claimed = claimed
        self._waiting: list[tuple[DatasetId, Callable[[], None]]] = []

    def add(self, dataset: DatasetId, then: Callable[[], None]) -> None:
        """Call `then` when no claim of the dataset is under way; at once where that is so."""
        self._waiting.append((dataset, then))
        self.tell()

    def tell(self) -> None:
        """Call whoever has waited long enough, in the order in which they came."""
        waiting, self._waiting = self._waiting, []
        for dataset, then in waiting:
            if self._claimed(dataset):
                then()
            else:
                self._waiting.append((dataset, then))
