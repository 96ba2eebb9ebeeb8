"""What a reader holds, by the rules of `loader/reading/lease_table.py`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from cachesvc.core.model import Stay

LOOK_S = 1.0
"""As the loader's presence: so much later at the most what is recalled goes back, unless a read looks at it."""
T = TypeVar("T")


class Holding(Generic[T]):
    """What is kept stays until it is recalled; what streams until a later read leaves it, or for one read only where the
    room is for others. The methods name what goes back then."""

    def __init__(self) -> None:
        self.held: set[T] = set()
        self._brief: set[T] = set()
        self._recalled: set[T] = set()
        self._pressed = False

    def granted(self, extent: T, stay: Stay) -> None:
        """One more is held."""
        self.held.add(extent)
        if stay != "kept":
            self._brief.add(extent)
        self._pressed |= stay == "once"

    def read(self, touched: Collection[T]) -> set[T]:
        """A read of these is over."""
        passed = self._brief if self._pressed else self._brief.difference(touched)
        self._pressed = False
        return self._forget(passed | self._recalled & self.held)

    def refused(self) -> set[T]:
        """There was no room for what a read needs: it has copied out what came, and holds nothing while it waits."""
        return self._forget(set(self.held))

    def recalled(self, extent: T, reading: Collection[T]) -> set[T]:
        """It is asked for, while a read looks at others."""
        if extent in reading:
            self._recalled.add(extent)
            return set()
        return self._forget({extent} & self.held)

    def _forget(self, gone: set[T]) -> set[T]:
        self.held -= gone
        self._brief -= gone
        self._recalled -= gone
        return gone
