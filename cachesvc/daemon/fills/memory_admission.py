"""Memory for the fills under way: one that would take too much waits for others to end, and for the RAM tier to shrink."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Indirect, Table
from cachesvc.core.records.tier_state import TierState
from cachesvc.sources.fetch import BUFFERS_BYTES

DECODED_TIMES = 6
"""Memory for an extent of Parquet, in extents: compressed bytes, rows, and four columns that pyarrow decodes."""
MOST_LOOKS = 3
"""Then a fill begins though the RAM tier has not shrunk: it may hold what is pinned, or what readers map."""
KEPT_LOOKS = 10
"""A filler keeps its buffers for the next fill while it works at another one: what fills took lately counts as theirs."""


def cost_of(catalog: Catalog, size_bytes: int) -> int:
    """The memory that a filler needs to fill an extent of `size_bytes` from its source."""
    if isinstance(catalog.layout, Table):
        return DECODED_TIMES * size_bytes
    if isinstance(catalog.layout, Indirect):  # a compressed one is held as it is stored
        return size_bytes
    return min(size_bytes, BUFFERS_BYTES)


@dataclass(slots=True)
class _Fill:
    cost_bytes: int
    begin: Callable[[], None]
    looks: int = 0


class Work:
    """Begins fills in the order in which they come. On the loop's thread."""

    def __init__(self, least_bytes: int, room_bytes: int, ram: TierState | None) -> None:
        """Fills may take `least_bytes` in any case, and with the RAM tier together `room_bytes`."""
        self._least_bytes, self._room_bytes, self._ram = least_bytes, room_bytes, ram
        self._waiting: deque[_Fill] = deque()
        self._used_bytes = self._peak_bytes = 0
        self._peaks: deque[int] = deque(maxlen=KEPT_LOOKS)

    @property
    def to_come_bytes(self) -> int:
        """Memory that fills may take beside what they have or had lately: the RAM tier leaves it free."""
        wanted_bytes = self._used_bytes + self._waiting[0].cost_bytes if self._waiting else 0
        return max(0, max(self._least_bytes, wanted_bytes) - max(self._peak_bytes, *self._peaks, 0))

    def begin(self, cost_bytes: int, fill: Callable[[], None]) -> None:
        """Call `fill` as soon as there is memory for it; `end` is to be called when it has ended."""
        self._waiting.append(_Fill(cost_bytes, fill))
        self._begin_waiting()

    def end(self, cost_bytes: int) -> None:
        """A fill has ended."""
        self._used_bytes -= cost_bytes
        self._begin_waiting()

    def look(self) -> None:
        """See whether the RAM tier has made room; after each measurement of the memory."""
        self._peaks.append(self._peak_bytes)
        self._peak_bytes = self._used_bytes
        if self._waiting:
            self._waiting[0].looks += 1
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self._may_begin(self._waiting[0]):
            fill = self._waiting.popleft()
            self._used_bytes += fill.cost_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            fill.begin()

    def _may_begin(self, fill: _Fill) -> bool:
        used_bytes = self._used_bytes + fill.cost_bytes
        if used_bytes <= self._least_bytes:
            return True
        ram_bytes = self._ram.used_bytes + self._ram.held_bytes if self._ram else 0
        if used_bytes + ram_bytes <= self._room_bytes:
            return True
        # Nothing else ends: it waits for the RAM tier alone, which is measured every second where there is one.
        return not self._used_bytes and (self._ram is None or fill.looks >= MOST_LOOKS)
