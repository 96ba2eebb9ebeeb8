"""A plan: a rank's order, its cursor, and the part of it that has been entered."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from cachesvc.core.lookahead.order_windows import OrderWindow
from cachesvc.core.lookahead.schedule import Schedule
from cachesvc.core.model import ExtentId
from cachesvc.core.records.dataset_state import EpochTally


@dataclass(slots=True, eq=False)
class PlanState:
    """A rank's order, of which the rows [passed, next) have been entered. A row is (extent, first_step, last_step)."""

    number: int
    job: int
    rows: tuple[tuple[ExtentId, int, int], ...]
    window: OrderWindow
    launch: int = 0
    tally: EpochTally | None = None
    counted_before: int = 0
    """The step before which its extents are counted in the epoch already: its reader connected anew."""
    schedule: Schedule | None = None
    """How far ahead the plan may fetch, where the data does not fit."""
    paced: bool = True
    """False while the schedule is being made."""
    behind: bool = False
    """Some rows that it passed are still to be given up."""
    next: int = 0
    passed: int = 0
    entered_bytes: int = 0
    entered: list[tuple[int, int, int]] = field(default_factory=list)
    """Heap of (last_step, index, bytes that it counts for) of the entered rows that are not passed."""

    @property
    def exhausted(self) -> bool:
        """Every row has been entered or skipped."""
        return self.next >= len(self.rows)

    @property
    def urgency(self) -> tuple[int, int, int]:
        """The steps that remain until the next row is needed, then when the window last fetched, then the plan's number."""
        return self.rows[self.next][1] - self.passed, self.window.served_at, self.number

    def enter(self, size_bytes: int) -> None:
        """Enter the next row, which counts for `size_bytes`."""
        heapq.heappush(self.entered, (self.rows[self.next][2], self.next, size_bytes))
        self.entered_bytes += size_bytes
        self.next += 1

    def leave(self) -> Iterator[tuple[ExtentId, int]]:
        """Remove the entered rows whose last step has been passed; the extent and last step of each."""
        while self.entered and self.entered[0][0] < self.passed:
            last_step, index, size_bytes = heapq.heappop(self.entered)
            self.entered_bytes -= size_bytes
            yield self.rows[index][0], last_step

    def skip_passed(self) -> Iterator[tuple[ExtentId, int]]:
        """Skip rows that were consumed before they were entered; the extent and last step of each."""
        while self.next < len(self.rows) and self.rows[self.next][2] < self.passed:
            extent, _, last_step = self.rows[self.next]
            self.next += 1
            yield extent, last_step
