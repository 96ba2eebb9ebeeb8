"""A queue in which datasets take turns: a scan that asks for a thousand extents stands before another job's
first by one extent, not by a thousand."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

_T = TypeVar("_T")


class Turns(Generic[_T]):
    """First come, first served among the items of one owner; owners in turn. Every operation but iteration is
    O(1). The bound is its user's."""

    def __init__(self) -> None:
        self._lines: OrderedDict[Hashable, deque[_T]] = OrderedDict()
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[_T]:
        return (item for line in self._lines.values() for item in line)

    def append(self, owner: Hashable, item: _T) -> None:
        """Stand in the owner's line, which joins behind the others when it is new."""
        self._lines.setdefault(owner, deque()).append(item)
        self._size += 1

    @property
    def first(self) -> _T:
        """Whose turn it is; the same until `pass_on`. Raises StopIteration where nobody waits."""
        return next(iter(self._lines.values()))[0]

    def pass_on(self) -> None:
        """The first is done: the next owner's turn."""
        owner, line = next(iter(self._lines.items()))
        line.popleft()
        self._size -= 1
        if line:
            self._lines.move_to_end(owner)
        else:
            del self._lines[owner]
