"""Measures what a plan reads side by side and how much of it is absent, and schedules the plan where the data does not fit.

The work is done in steps between other events. Until it is done, the plan fetches nothing ahead.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

import numpy as np

from cachesvc.core.lookahead.order_windows import OrderWindows
from cachesvc.core.lookahead.plan_state import PlanState
from cachesvc.core.lookahead.schedule import schedule
from cachesvc.core.model import ExtentId
from cachesvc.core.records.cache_entry import CacheEntry, Role
from cachesvc.core.records.incremental import IncrementalWork, WorkKind
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.retention import STRETCHES, Retention

MAX_STEP = 1 << 48
"""Larger steps count as this one: steps come from readers and may be any number."""


class Pacing:
    """Schedules plans, and counts what is kept of the orders that follow them."""

    def __init__(self, copies: Copies, work: IncrementalWork, windows: OrderWindows) -> None:
        self._copies = copies
        self._work = work
        self._windows = windows

    def begin(self, plan: PlanState, following: Sequence[ExtentId]) -> None:
        """Schedule a plan. The first plan of a window that names the order after it also begins the window's retention."""
        plan.paced, retention = False, None
        if len(following) >= STRETCHES and plan.window.retention is None:
            retention = plan.window.retention = Retention(following)
        count = max(len(plan.rows), len(following))
        self._work.do((WorkKind.PACE, plan.number), self._pace(plan, retention), count)

    def _pace(self, plan: PlanState, retention: Retention | None) -> Iterator[None]:
        step, opened, total_bytes = self._work.size, OpenBytes(), 0
        first, costs = np.zeros(len(plan.rows), np.int64), np.zeros(len(plan.rows), np.int64)
        for start in range(0, len(plan.rows), step):
            rows = plan.rows[start : start + step]
            known = [self._copies.entry(extent) for extent, _, _ in rows]
            first[start : start + step] = [min(row[1], MAX_STEP) for row in rows]
            costs[start : start + step] = [_cost(entry) for entry in known]
            for entry, row in zip(known, rows, strict=True):
                size_bytes = entry.size_bytes if entry else 0
                opened.add(size_bytes, row[1], row[2])
                total_bytes += size_bytes
            yield
        if retention is not None:
            yield from retention.count(self._is_kept, step)
        absent_bytes = opened.most_bytes * int(costs.sum()) // max(1, total_bytes)
        self._windows.note_reads(plan.window, opened.most_bytes, absent_bytes)
        room = self._windows.room_bytes(plan.window) if self._copies.policy.reserve.streams else 0
        plan.schedule = schedule(first, costs, room) if costs.any() and room else None
        plan.paced = True

    def _is_kept(self, extent: ExtentId) -> bool:
        entry = self._copies.entries.get(extent)
        return entry is not None and entry.kept


def _cost(entry: CacheEntry | None) -> int:
    """Bytes that an extent will cost the source: none where it is kept."""
    if entry is None or any(copy.role is Role.KEPT and copy.usable for copy in entry.copies):
        return 0
    return entry.size_bytes


class OpenBytes:
    """The most bytes of rows whose steps overlap: what has begun less what has ended, at each beginning."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._open_bytes = 0
        self._ends: list[int] = []
        """Heap of the last steps of the open rows."""
        self._ending_bytes: dict[int, int] = {}

    def add(self, size_bytes: int, first_step: int, last_step: int) -> None:
        """Add the next row, in the order of first steps."""
        while self._ends and self._ends[0] < first_step:
            self._open_bytes -= self._ending_bytes.pop(heapq.heappop(self._ends))
        if last_step not in self._ending_bytes:
            heapq.heappush(self._ends, last_step)
        self._ending_bytes[last_step] = self._ending_bytes.get(last_step, 0) + size_bytes
        self._open_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self._open_bytes)
