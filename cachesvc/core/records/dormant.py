"""What a tier held at start and nobody has named since: ids and sizes, without records.

A daemon that starts over a million extents knows them in a dictionary of ids, a tenth of what their records would
take. The record of a copy is made when somebody names its extent, or when its room is needed: these go first,
for nobody has used them for longest.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView
from typing import TYPE_CHECKING

from cachesvc.core.model import ExtentId

if TYPE_CHECKING:
    from cachesvc.core.records.cache_entry import Copy


class DormantExtents:
    """The extents that one tier held at start and that have no record yet, by their ids."""

    __slots__ = ("_record", "_sizes", "size_bytes")

    def __init__(self) -> None:
        self._sizes: dict[ExtentId, int] = {}
        self._record: Callable[[ExtentId, int], Copy] | None = None
        self.size_bytes = 0

    def add(self, extents: dict[ExtentId, int], record: Callable[[ExtentId, int], Copy]) -> None:
        """Take note of extents and their sizes in bytes, those first that should go first. `record(extent, size)` makes
        the copy of one that was just removed from here."""
        assert not self._sizes, "found twice"
        self._sizes = dict(reversed(extents.items()))  # what came last is cheap to take out of a dictionary
        self._record = record
        self.size_bytes = sum(self._sizes.values())

    def clear(self) -> None:
        """Forget all."""
        self._sizes, self.size_bytes = {}, 0

    def take(self, extent: ExtentId) -> int | None:
        """Remove an extent that gets its record now; its size in bytes, None where it is not here."""
        size_bytes = self._sizes.pop(extent, None)
        if size_bytes is not None:
            self.size_bytes -= size_bytes
        return size_bytes

    def records(self) -> Iterator[Copy]:
        """The copies in the order in which they go. Each gets its record when it is asked for."""
        while self._sizes and self._record:
            extent, size_bytes = self._sizes.popitem()
            self.size_bytes -= size_bytes
            yield self._record(extent, size_bytes)

    def get(self, extent: ExtentId) -> int | None:
        """The size in bytes of an extent that is here; it stays."""
        return self._sizes.get(extent)

    def keys(self) -> KeysView[ExtentId]:
        """The extents that are here, those first that go last."""
        return self._sizes.keys()

    def items(self) -> ItemsView[ExtentId, int]:
        """Those and their sizes in bytes, in the same order."""
        return self._sizes.items()

    def __contains__(self, extent: ExtentId) -> bool:
        return extent in self._sizes

    def __iter__(self) -> Iterator[ExtentId]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)
