"""A queue in which jobs take turns: a scan that asks for a thousand extents stands before another job's
first by one extent, not by a thousand."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class FairQueue(Generic[_T]):
    """First come, first served among the items of one owner; owners in turn. Every operation but iteration is
    O(1). The bound is its user's."""

    def __init__(self) -> None:
        self._lines: OrderedDict[int, deque[_T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[tuple[int, _T]]:
        return ((owner, item) for owner, line in self._lines.items() for item in line)

    def append(self, owner: int, item: _T) -> None:
        """Stand in the owner's line, which joins behind the others when it is new."""
        self._lines.setdefault(owner, deque()).append(item)
        self._size += 1

    @property
    def first(self) -> tuple[int, _T]:
        """Whose turn it is, and for what; the same until `served` or `drop`. Raises StopIteration where nobody
        waits."""
        owner, line = next(iter(self._lines.items()))
        return owner, line[0]

    def served(self) -> None:
        """The first got what it waited for: the next owner's turn."""
        owner, _ = self.first
        self.drop()
        if owner in self._lines:
            self._lines.move_to_end(owner)

    def drop(self) -> None:
        """The first needs nothing any more, which costs its owner no turn."""
        owner, line = next(iter(self._lines.items()))
        line.popleft()
        self._size -= 1
        if not line:
            del self._lines[owner]
