"""Extents that a simulated reader holds, by the rules of `loader/reading/lease_table.py`."""

from __future__ import annotations

from collections.abc import Collection
from typing import Generic, TypeVar

from cachesvc.core.model import Stay

RECALL_DELAY_S = 1.0
"""The loader polls for recalls once a second: the most by which a release is late, unless a read uses the extent."""
T = TypeVar("T")


class Holding(Generic[T]):
    """Extents that a reader holds: kept ones until they are recalled; streaming ones until a later read leaves them out,
    or for one read only where others need the room. The methods return what the reader releases."""

    def __init__(self) -> None:
        self.held: set[T] = set()
        self._brief: set[T] = set()
        self._recalled: set[T] = set()
        self._pressed = False

    def granted(self, extent: T, stay: Stay) -> None:
        """Hold one more extent."""
        self.held.add(extent)
        if stay != "kept":
            self._brief.add(extent)
        self._pressed |= stay == "once"

    def read(self, touched: Collection[T]) -> set[T]:
        """End a read of these extents."""
        passed = self._brief if self._pressed else self._brief.difference(touched)
        self._pressed = False
        return self._forget(passed | self._recalled & self.held)

    def refused(self) -> set[T]:
        """Release everything: a read found no room. It has copied out what came, and holds nothing while it waits."""
        return self._forget(set(self.held))

    def recalled(self, extent: T, reading: Collection[T]) -> set[T]:
        """Release a recalled extent, now or after the read that uses it."""
        if extent in reading:
            self._recalled.add(extent)
            return set()
        return self._forget({extent} & self.held)

    def _forget(self, gone: set[T]) -> set[T]:
        self.held -= gone
        self._brief -= gone
        self._recalled -= gone
        return gone
