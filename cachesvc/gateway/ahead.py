"""Chooses the extents to fetch ahead of a program that reads files in the order of their names, or a file from its
beginning.

Extents lie in that order, so such a program touches one after the other, perhaps from several threads. A program that
reads here and there touches extents that lie apart, and nothing is fetched ahead of it.
"""

from __future__ import annotations

from collections import deque

from cachesvc.catalog.columns import Ints

PATTERN = 3
"""Extents that lie close together before any is fetched ahead."""
MOST = 64
MOST_BYTES = 64 << 20
"""What is fetched ahead is twice what was read in order, within these two."""
GAPS = 1.34
"""What was read in order may leave out a quarter: other threads are about to read it."""


class Ahead:
    """The pattern in the reads of one dataset. Not thread-safe."""

    def __init__(self, sizes: Ints) -> None:
        """`sizes`: bytes of each extent."""
        self._sizes = sizes
        self._recent: deque[int] = deque(maxlen=MOST // 2)
        """Extents that were read in order, distinct."""
        self._planned = range(0)

    @property
    def planned(self) -> bool:
        """True while extents are fetched ahead."""
        return bool(self._planned)

    def read(self, extent: int, last: int) -> range | None:
        """Note that a read begins to need an extent, and goes on to `last`. Return the extents to fetch ahead of it, in
        place of those returned before: none where the pattern ends; None where they stay."""
        if extent not in self._recent:
            self._recent.append(extent)
        while max(self._recent) - min(self._recent) + 1 > GAPS * len(self._recent):
            self._recent.popleft()
        count, front = len(self._recent), max(self._recent)
        forward = count >= PATTERN and extent > front - count / 2
        most = max(2 * count if forward else 0, last - extent)
        found = self._within(extent if last > extent else front, min(most, MOST))
        if not found and (count >= PATTERN or not self._planned):
            return None
        if found and extent < self._planned.stop and self._planned.stop - found.start > len(found) // 2:
            return None  # half of them are still ahead
        self._planned = found
        return found

    def _within(self, front: int, most: int) -> range:
        stop, size = front + 1, 0
        while stop <= min(front + most, len(self._sizes) - 1) and size + self._sizes[stop] <= MOST_BYTES:
            size += int(self._sizes[stop])
            stop += 1
        return range(front + 1, stop)
