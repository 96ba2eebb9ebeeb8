"""Extents that a tier held at start and that no event has named since: ids and sizes, without records.

A daemon that starts over a million extents holds them in a dictionary of ids, which takes a tenth of the memory and time of
their records. The record of a copy is made when an event names its extent, or when its room is needed. Dormant extents
are evicted first, for no reader has used them for longest.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView
from typing import TYPE_CHECKING

from cachesvc.core.model import ExtentId

if TYPE_CHECKING:
    from cachesvc.core.records.cache_entry import Copy


class DormantExtents:
    """The dormant extents of one tier, and their sizes in bytes."""

    __slots__ = ("_record", "_sizes", "size_bytes")

    def __init__(self) -> None:
        self._sizes: dict[ExtentId, int] = {}
        self._record: Callable[[ExtentId, int], Copy] | None = None
        self.size_bytes = 0

    def add(self, extents: dict[ExtentId, int], record: Callable[[ExtentId, int], Copy]) -> None:
        """Add extents and their sizes in bytes, in the order of eviction. `record(extent, size)` makes the copy of an
        extent that was just removed from here."""
        assert not self._sizes, "added twice"
        self._sizes = dict(reversed(extents.items()))  # removing the last item of a dictionary is cheap
        self._record = record
        self.size_bytes = sum(self._sizes.values())

    def clear(self) -> None:
        """Remove all extents."""
        self._sizes, self.size_bytes = {}, 0

    def take(self, extent: ExtentId) -> int | None:
        """Remove an extent, whose record is made now. Its size in bytes, or None where it is not here."""
        size_bytes = self._sizes.pop(extent, None)
        if size_bytes is not None:
            self.size_bytes -= size_bytes
        return size_bytes

    def records(self) -> Iterator[Copy]:
        """Remove extents and make their copies, in the order of eviction, as the caller iterates."""
        while self._sizes and self._record:
            extent, size_bytes = self._sizes.popitem()
            self.size_bytes -= size_bytes
            yield self._record(extent, size_bytes)

    def get(self, extent: ExtentId) -> int | None:
        """The size in bytes of an extent, or None where it is not here."""
        return self._sizes.get(extent)

    def keys(self) -> KeysView[ExtentId]:
        """The extents, in the reverse order of eviction."""
        return self._sizes.keys()

    def items(self) -> ItemsView[ExtentId, int]:
        """The extents and their sizes in bytes, in the same order."""
        return self._sizes.items()

    def __contains__(self, extent: ExtentId) -> bool:
        return extent in self._sizes

    def __iter__(self) -> Iterator[ExtentId]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)
