"""The memory of fills under way. A fill that needs too much waits for others to end and for the RAM tier to shrink."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Columns
from cachesvc.core.records.residency import TierState
from cachesvc.sources.fetch import BUFFERS_BYTES

PARQUET_EXTENTS = 6
"""Memory for a fill from Parquet, in extents: compressed bytes, rows, and four columns that pyarrow decodes."""
MAX_MEASUREMENTS = 3
"""A fill starts after so many measurements even if the RAM tier has not shrunk, as where all its extents are pinned or
mapped by readers."""
KEPT_PEAKS = 10
"""Measurements for which a fill's memory still counts as in use: an idle filler keeps its buffers for the next fill."""


def memory_needed(catalog: Catalog, size_bytes: int) -> int:
    """The bytes of memory that a filler needs to fill an extent of `size_bytes` from its source."""
    if isinstance(catalog.layout, Columns) and catalog.format == "parquet":
        return PARQUET_EXTENTS * size_bytes
    if catalog.compressed:  # an object is held as it is stored
        return size_bytes
    return min(size_bytes, BUFFERS_BYTES)


@dataclass(slots=True)
class _WaitingFill:
    needed_bytes: int
    begin: Callable[[], None]
    measurements: int = 0


class FillMemory:
    """Starts fills in the order in which they were submitted. Runs on the loop's thread."""

    def __init__(self, least_bytes: int, room_bytes: int, ram: TierState | None) -> None:
        """Fills may always take `least_bytes`, and together with the RAM tier `room_bytes`."""
        self._least_bytes, self._room_bytes, self._ram = least_bytes, room_bytes, ram
        self._waiting: deque[_WaitingFill] = deque()
        self._used_bytes = self._peak_bytes = 0
        self._peaks: deque[int] = deque(maxlen=KEPT_PEAKS)

    @property
    def to_come_bytes(self) -> int:
        """Memory that fills may take beyond their recent peak; the RAM tier leaves it free."""
        wanted_bytes = self._used_bytes + self._waiting[0].needed_bytes if self._waiting else 0
        return max(0, max(self._least_bytes, wanted_bytes) - max(self._peak_bytes, *self._peaks, 0))

    def begin(self, needed_bytes: int, fill: Callable[[], None]) -> None:
        """Call `fill` as soon as there is memory for it; the caller calls `end` when the fill has ended."""
        self._waiting.append(_WaitingFill(needed_bytes, fill))
        self._begin_waiting()

    def end(self, needed_bytes: int) -> None:
        """Free the memory of a fill that has ended."""
        self._used_bytes -= needed_bytes
        self._begin_waiting()

    def memory_measured(self) -> None:
        """Check again, after each measurement of the memory, whether the RAM tier has made room."""
        self._peaks.append(self._peak_bytes)
        self._peak_bytes = self._used_bytes
        if self._waiting:
            self._waiting[0].measurements += 1
            self._begin_waiting()

    def _begin_waiting(self) -> None:
        while self._waiting and self._may_begin(self._waiting[0]):
            fill = self._waiting.popleft()
            self._used_bytes += fill.needed_bytes
            self._peak_bytes = max(self._peak_bytes, self._used_bytes)
            fill.begin()

    def _may_begin(self, fill: _WaitingFill) -> bool:
        used_bytes = self._used_bytes + fill.needed_bytes
        if used_bytes <= self._least_bytes:
            return True
        ram_bytes = self._ram.used_bytes + self._ram.held_bytes if self._ram else 0
        if used_bytes + ram_bytes <= self._room_bytes:
            return True
        # A fill that runs alone waits only for the RAM tier, which is measured every second where there is one.
        return not self._used_bytes and (self._ram is None or fill.measurements >= MAX_MEASUREMENTS)
