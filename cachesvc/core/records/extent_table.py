"""A dictionary by extent that never stops its user for long.

A dictionary grows in one go: at 700,000 entries it takes 30 ms for that, four times as long where the host gives
memory slowly, and the daemon's loop stands still meanwhile. Many small ones, by a byte of the id, grow one at a
time. Their order depends on the ids alone, so that a replay sees the same.
"""

from __future__ import annotations

from collections.abc import Iterator, KeysView
from typing import Generic, TypeVar

from cachesvc.core.model import ExtentId

T = TypeVar("T")
PARTS = 256


class Table(Generic[T]):
    """Values by extent id (not empty, and any byte of it as likely as another); those of a part in the order in which
    they came."""

    __slots__ = ("_parts",)

    def __init__(self) -> None:
        self._parts: list[dict[ExtentId, T]] = [{} for _ in range(PARTS)]

    def get(self, extent: ExtentId) -> T | None:
        """The value, None where there is none."""
        return self._parts[extent[0]].get(extent)

    def pop(self, extent: ExtentId) -> T | None:
        """Remove and return the value, None where there is none."""
        return self._parts[extent[0]].pop(extent, None)

    def clear_in_parts(self) -> Iterator[None]:
        """Remove all, a part at a time: gives way after each."""
        for part in self._parts:
            part.clear()
            yield

    def values(self) -> Iterator[T]:
        """All of them."""
        for part in self._parts:
            yield from part.values()

    def isdisjoint(self, extents: KeysView[ExtentId]) -> bool:
        """Whether it has none of these. O(the fewer of them)."""
        return all(part.keys().isdisjoint(extents) for part in self._parts)

    def __iter__(self) -> Iterator[ExtentId]:
        for part in self._parts:
            yield from part

    def __getitem__(self, extent: ExtentId) -> T:
        return self._parts[extent[0]][extent]

    def __setitem__(self, extent: ExtentId, value: T) -> None:
        self._parts[extent[0]][extent] = value

    def __contains__(self, extent: ExtentId) -> bool:
        return extent in self._parts[extent[0]]

    def __len__(self) -> int:
        return sum(map(len, self._parts))
