"""Copies in the order in which they may be evicted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cachesvc.core.records.cache_entry import Copy


class EvictionList:
    """Copies that may be evicted now, oldest first, and their bytes. Adding at either end and removing cost O(1).

    The list is linked through its copies, so a million of them take no memory here, and it never pauses to grow.
    """

    __slots__ = ("_count", "_oldest", "_youngest", "size_bytes")

    def __init__(self) -> None:
        self._oldest: Copy | None = None
        self._youngest: Copy | None = None
        self._count = 0
        self.size_bytes = 0

    def add(self, copy: Copy, first: bool = False) -> None:
        """Add a copy, which is on no list, as the youngest, or as the first to be evicted."""
        if first:
            self._link(copy, self._oldest)
            self._link(None, copy)
        else:
            self._link(self._youngest, copy)
            self._link(copy, None)
        copy.eviction_list = self
        self._count += 1
        self.size_bytes += copy.entry.size_bytes

    def remove(self, copy: Copy) -> None:
        """Remove a copy, which must be on this list."""
        assert copy.eviction_list is self, "on another list"
        self._link(copy.older, copy.younger)
        copy.older = copy.younger = copy.eviction_list = None
        self._count -= 1
        self.size_bytes -= copy.entry.size_bytes

    def _link(self, older: Copy | None, younger: Copy | None) -> None:
        if older is None:
            self._oldest = younger
        else:
            older.younger = younger
        if younger is None:
            self._youngest = older
        else:
            younger.older = older

    def __iter__(self) -> Iterator[Copy]:
        """The copy just yielded may be removed meanwhile."""
        copy = self._oldest
        while copy is not None:
            following = copy.younger
            yield copy
            copy = following

    def __reversed__(self) -> Iterator[Copy]:
        """The copy just yielded may be removed meanwhile."""
        copy = self._youngest
        while copy is not None:
            following = copy.older
            yield copy
            copy = following

    def __len__(self) -> int:
        return self._count
