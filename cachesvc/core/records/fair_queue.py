"""A queue that serves its owners round robin: a scan that asks for a thousand extents delays another job's first extent
by one extent, not by a thousand.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FairQueue(Generic[_T]):
    """Items of one owner in order of arrival, owners in turn. Every operation but iteration is O(1). The caller limits its
    length."""

    def __init__(self) -> None:
        self._lines: OrderedDict[int, deque[_T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[tuple[int, _T]]:
        return ((owner, item) for owner, line in self._lines.items() for item in line)

    def append(self, owner: int, item: _T) -> None:
        """Add an item to its owner's line. A new line joins behind the others."""
        self._lines.setdefault(owner, deque()).append(item)
        self._size += 1

    @property
    def first(self) -> tuple[int, _T]:
        """The owner that is served next, and its first item; the same until `served` or `drop`. Raises StopIteration
        for an empty queue."""
        owner, line = next(iter(self._lines.items()))
        return owner, line[0]

    def served(self) -> None:
        """Remove the first item, which was served: the next owner follows."""
        owner, _ = self.first
        self.drop()
        if owner in self._lines:
            self._lines.move_to_end(owner)

    def drop(self) -> None:
        """Remove the first item, which needs nothing any more: its owner stays next."""
        owner, line = next(iter(self._lines.items()))
        line.popleft()
        self._size -= 1
        if not line:
            del self._lines[owner]
