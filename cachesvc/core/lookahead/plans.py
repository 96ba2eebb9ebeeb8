"""Plans: their cursors, what their entered rows protect, and what is counted of their epochs.

A row is entered when look-ahead reaches it, and left when the plan's cursor, which is what its rank has consumed, passes
it. Between the two it counts as a need of its extent, which protects the extent's copies. A cursor that moves far, as in a
resume, leaves a backlog of rows that is given up in steps between other events. So is a long plan at its end.

Ranks of one job run through an epoch side by side, each with a plan of its own, and count as one. A plan begins another
epoch where its number was in the job's latest epoch, where all plans of that epoch have ended, and for another job. A
reader that connects anew in mid-epoch has another number and the same rows: its plan goes on where it was broken off.

Where the data does not fit, what a plan reads side by side and how much of it is absent is measured, and the plan is
scheduled (`schedule.py`), in steps between other events. Until that is done, the plan fetches nothing ahead.

The first extents of the next epoch, where its order is known, follow the rows of a plan: they are entered once all rows
are, and no cursor passes them. The plan of the next epoch, of the same number, takes them over.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, takewhile

import numpy as np

from cachesvc.core.events import Passed, PlanEnded, Planned
from cachesvc.core.lookahead.order_windows import OrderWindow, OrderWindows
from cachesvc.core.lookahead.schedule import OpenBytes, Schedule, schedule
from cachesvc.core.model import ExtentId
from cachesvc.core.records.dataset_state import DatasetState, EpochTally
from cachesvc.core.records.incremental import IncrementalWork, WorkKind
from cachesvc.core.records.residency import CacheEntry, Role
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.retention import STRETCHES, Retention

FIRST_ROWS = 64
"""Rows that identify a plan, together with the number of rows: in a shuffled epoch they differ between all plans."""
MAX_BROKEN = 1024
"""Plans of an epoch that are remembered as broken off; the oldest are forgotten first."""
MAX_STEP = 1 << 48
"""Larger steps count as this one: steps come from readers and may be any number."""
NEXT_EPOCH = 1 << 64
"""The step of the extents that follow a plan's rows. No reader can name it."""
MAX_TAKEN_OVER = 256
"""Extents of the next epoch that one plan fetches: its successor takes them over in one event."""


class Plans:
    """Plans by number."""

    def __init__(self, copies: Copies, work: IncrementalWork, windows: OrderWindows) -> None:
        self._copies = copies
        self._policy = copies.policy
        self._context = copies.context
        self._work = work
        self._windows = windows
        self.plans: dict[int, PlanState] = {}
        self._launches = Counter[int]()
        """How many plans each launch has; a plan without one counts under its own number, as in the readers' queue."""
        self.ending: set[PlanState] = set()
        """Plans that have ended, while their entered rows are given up."""

    def begin(self, event: Planned) -> None:
        """Begin a plan, in place of an older one of the same number."""
        number, entries = event.plan, event.rows
        former, taken = self.plans.get(number), list[CacheEntry]()
        if former is not None:
            taken = [self._copies.entries[each] for each in former.entered_of_next_epoch()]
            for entry in taken:  # protected until the new plan has entered it
                self._copies.need(entry)
        self.end(number)
        shared = self._windows.join(number, entries, event.user)
        following = event.following[:MAX_TAKEN_OVER]
        plan = self.plans[number] = PlanState(number, event.job, entries, shared, event.launch, following)
        self._launches[event.launch or number] += 1
        if (home := self._home(event)) is not None:
            plan.tally, plan.counted_before = self._join_epoch(event, home)
        if former is not None and taken:
            self._take_over(plan, former, taken)
        if entries and (self._policy.reserve.streams or self._policy.reserve.ahead_of_nvme):
            self._begin_pacing(plan, event.following)

    def _take_over(self, plan: PlanState, former: PlanState, taken: Sequence[CacheEntry]) -> None:
        """Enter the rows that the plan before has fetched. What it fetched ahead was not read, and is no hit."""
        for entry, (extent, _, _) in zip(taken, plan.rows, strict=False):
            if entry.id != extent:
                break
            for copy in entry.copies:
                if copy.ahead_of is former.window.ahead:
                    copy.ahead_of.remove(copy)
                    plan.window.ahead.add(copy)
                    entry.sourced_at = self._context.now
            self.enter(plan, entry)
        for entry in taken:
            self._copies.end_need(entry)
            self._copies.forget(entry)

    def end(self, number: int) -> None:
        """End a plan, and give up its entered rows."""
        plan = self.plans.pop(number, None)
        if plan:
            self._work.drop((WorkKind.PACE, number))
            self._work.drop((WorkKind.PASS, number))
            self.ending.add(plan)
            launch = plan.launch or number
            self._launches[launch] -= 1
            if not self._launches[launch]:
                del self._launches[launch]
            if plan.tally is not None:
                plan.tally.running.discard(number)
            retention = plan.window.retention
            count = max(len(plan.rows), len(retention.following) if retention else 0)
            self._work.do((WorkKind.END, plan), self._end(plan), count)
            self._windows.leave(plan.window, number)

    def count_of(self, launch: int) -> int:
        """Return the number of plans of a launch."""
        return self._launches[launch]

    def ended(self, event: PlanEnded) -> None:
        """End a plan that its rank gave up or finished."""
        self.end(event.plan)

    def end_job(self, job: int) -> None:
        """End a job's plans."""
        for number in [plan.number for plan in self.plans.values() if plan.job == job]:
            self.end(number)

    def passed(self, event: Passed) -> None:
        """Move a plan's cursor; it never goes back."""
        plan = self.plans.get(event.plan)
        if plan and event.step > plan.passed:
            plan.passed = event.step
            work = self._pass(plan)
            plan.behind = next(work, work) is not work
            if plan.behind:
                self._work.begin((WorkKind.PASS, plan.number), work)

    def begins(self, plan: PlanState) -> bool:
        """Return whether extents of a plan's first step are on their way, and its next row is of a later step."""
        first = plan.rows[0][1]
        if plan.passed > first or plan.row(plan.next)[1] == first:
            return False
        rows = takewhile(lambda row: row[1] == first, plan.rows[:FIRST_ROWS])
        entries = (self._copies.entries.get(extent) for extent, _, _ in rows)
        return any(entry is not None and entry.filling() and not entry.ready for entry in entries)

    def enter(self, plan: PlanState, entry: CacheEntry) -> None:
        """Enter a plan's next row, which protects its extent from here on."""
        # kept extents are free: a schedule limits how far a plan goes over them
        free = plan.schedule is not None and entry.ready and entry.kept
        plan.enter(0 if free else entry.size_bytes)
        self._copies.need(entry)

    def withdraw_next_epoch(self) -> bool:
        """Give up what plans have entered of the next epoch, where rows of this one wait for room; whether there was any.
        The plan of the next epoch enters it again."""
        withdrawn = [(plan, extent) for plan in self.plans.values() for extent in plan.withdraw_following()]
        for plan, extent in withdrawn:
            self._leave(plan, extent)
        return bool(withdrawn)

    def skip(self, plan: PlanState, extent: ExtentId) -> None:
        """Skip a plan's next row: it was consumed before a row that is not yet, or its extent is unknown."""
        if not plan.in_next_epoch:
            self._count(plan, extent, plan.rows[plan.next][2])
        plan.next += 1

    def _leave(self, plan: PlanState, extent: ExtentId, done: bool = False) -> None:
        entry = self._copies.entries[extent]
        self._copies.end_need(entry)
        if not entry.needs:
            if done and plan.window.retention is not None:
                kept = next((copy for copy in entry.copies if copy.role is Role.KEPT), None)
                plan.window.retention.passed(extent, kept)
            self._copies.forget(entry)

    def _pass(self, plan: PlanState) -> Iterator[None]:
        """Give up the rows before its cursor, also where that moves meanwhile; yields after each step."""
        step = self._work.size
        for _ in islice(self._pass_each(plan), step - 1, None, step):
            yield
        plan.behind = False

    def _pass_each(self, plan: PlanState) -> Iterator[None]:
        for extent, last_step in plan.leave():
            self._count(plan, extent, last_step)
            self._leave(plan, extent, done=True)
            yield
        for extent, last_step in plan.skip_passed():
            self._count(plan, extent, last_step)
            yield

    def _end(self, plan: PlanState) -> Iterator[None]:
        """Give up its entered rows, then all its rows, then the counts of the order after it, in steps: freeing a million
        at once would take 100 ms. What it has passed still counts in its epoch."""
        if plan.behind:
            yield from self._pass(plan)
        _leave_epoch(plan)
        step = self._work.size
        while plan.entered:
            for _, index, _ in plan.entered[-step:]:
                plan.entered.pop()
                self._leave(plan, plan.row(index)[0])
            yield
        self.ending.remove(plan)
        rows, plan.rows = list(plan.rows), ()
        while rows:
            yield
            del rows[-step:]
        if plan.window.retention is not None and not plan.window.plans:
            yield from plan.window.retention.end(step)

    def _home(self, event: Planned) -> DatasetState | None:
        """The dataset that a plan reads."""
        entry = self._copies.entries.get(event.rows[0][0]) if event.rows else None
        return entry.home(event.job) if entry else None

    def _count(self, plan: PlanState, extent: ExtentId, last_step: int) -> None:
        plan.window.moved_at = self._context.now
        entry = self._copies.entry(extent)
        if plan.tally is not None and entry is not None and last_step >= plan.counted_before:
            plan.tally.touched += 1
            plan.tally.hits += entry.sourced_at < plan.tally.began_at

    def _join_epoch(self, event: Planned, home: DatasetState) -> tuple[EpochTally, int]:
        """The epoch that a plan joins, and the step before which its extents have been counted there already."""
        fingerprint, epochs = _fingerprint(event.rows), home.epochs
        tally = next((each for each in reversed(epochs) if each.launch == event.launch), None)
        continues = tally is not None and (tally.running or fingerprint in tally.broken)
        if tally is None or not continues or event.plan in tally.plans:
            number = epochs[-1].number + 1 if epochs else 0
            bound = self._policy.shares.bound_of(home)
            tally = EpochTally(number, bound, event.launch, self._context.now)
            epochs.append(tally)
        tally.plans.add(event.plan)
        tally.running.add(event.plan)
        return tally, tally.broken.pop(fingerprint, 0)

    def _begin_pacing(self, plan: PlanState, following: Sequence[ExtentId]) -> None:
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
        room = self._windows.room_bytes(plan.window) if self._policy.reserve.streams else 0
        plan.schedule = schedule(first, costs, room) if costs.any() and room else None
        plan.paced = True

    def _is_kept(self, extent: ExtentId) -> bool:
        entry = self._copies.entries.get(extent)
        return entry is not None and entry.kept


def _leave_epoch(plan: PlanState) -> None:
    """Note a plan that has ended before its last row, while it still has its rows."""
    tally = plan.tally
    if tally is None or plan.passed_all:
        return
    while len(tally.broken) >= MAX_BROKEN:
        del tally.broken[next(iter(tally.broken))]
    tally.broken[_fingerprint(plan.rows)] = max(plan.passed, plan.counted_before)


def _fingerprint(rows: Sequence[tuple[ExtentId, int, int]]) -> int:
    return hash((len(rows), tuple(rows[:FIRST_ROWS])))


def _cost(entry: CacheEntry | None) -> int:
    """Bytes that an extent will cost the source: none where it is kept."""
    if entry is None or any(copy.role is Role.KEPT and copy.usable for copy in entry.copies):
        return 0
    return entry.size_bytes


@dataclass(slots=True, eq=False)
class PlanState:
    """A rank's order, of which the rows [passed, next) have been entered. A row is (extent, first_step, last_step)."""

    number: int
    job: int
    rows: tuple[tuple[ExtentId, int, int], ...]
    window: OrderWindow
    launch: int = 0
    following: Sequence[ExtentId] = ()
    """Extents of the next epoch, in order, which follow the rows."""
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
    _coming: deque[tuple[int, int]] = field(default_factory=deque)
    """(first_step, bytes) of the entered rows that are not read yet, in order."""
    _coming_bytes: int = 0

    @property
    def coming_bytes(self) -> int:
        """Bytes of the entered rows whose first step the cursor has not reached."""
        while self._coming and self._coming[0][0] <= self.passed:
            self._coming_bytes -= self._coming.popleft()[1]
        return self._coming_bytes

    @property
    def exhausted(self) -> bool:
        """Every row, and what follows them, has been entered or skipped."""
        return self.next >= len(self.rows) + len(self.following)

    @property
    def in_next_epoch(self) -> bool:
        """Every row has been entered or skipped: the next extent, if any, is one of the next epoch."""
        return self.next >= len(self.rows)

    @property
    def passed_all(self) -> bool:
        """The cursor has passed every row."""
        return self.in_next_epoch and (not self.entered or self.entered[0][0] == NEXT_EPOCH)

    @property
    def urgency(self) -> tuple[int, int, int]:
        """The steps that remain until the next row is needed, then when the window last fetched, then the plan's number."""
        return self.row(self.next)[1] - self.passed, self.window.served_at, self.number

    def row(self, index: int) -> tuple[ExtentId, int, int]:
        """A row, or one of an extent that follows them."""
        if index < len(self.rows):
            return self.rows[index]
        return self.following[index - len(self.rows)], NEXT_EPOCH, NEXT_EPOCH

    def entered_of_next_epoch(self) -> list[ExtentId]:
        """The entered extents that follow the rows, in order."""
        entered = sorted(index for _, index, _ in self.entered if index >= len(self.rows))
        return [self.row(index)[0] for index in entered]

    def withdraw_following(self) -> list[ExtentId]:
        """Remove the extents that follow the rows, once some have been entered; those, in order."""
        withdrawn = self.entered_of_next_epoch()
        if withdrawn:
            self.entered_bytes -= sum(each[2] for each in self.entered if each[0] == NEXT_EPOCH)
            self.entered = [each for each in self.entered if each[0] != NEXT_EPOCH]
            heapq.heapify(self.entered)
            while self._coming and self._coming[-1][0] == NEXT_EPOCH:
                self._coming_bytes -= self._coming.pop()[1]
            self.next, self.following = len(self.rows), ()
        return withdrawn

    def enter(self, size_bytes: int) -> None:
        """Enter the next row, which counts for `size_bytes`."""
        _, first_step, last_step = self.row(self.next)
        heapq.heappush(self.entered, (last_step, self.next, size_bytes))
        self._coming.append((first_step, size_bytes))
        self.entered_bytes += size_bytes
        self._coming_bytes += size_bytes
        self.next += 1

    def leave(self) -> Iterator[tuple[ExtentId, int]]:
        """Remove the entered rows whose last step has been passed; the extent and last step of each."""
        while self.entered and self.entered[0][0] < self.passed:
            last_step, index, size_bytes = heapq.heappop(self.entered)
            self.entered_bytes -= size_bytes
            yield self.row(index)[0], last_step

    def skip_passed(self) -> Iterator[tuple[ExtentId, int]]:
        """Skip rows that were consumed before they were entered; the extent and last step of each."""
        while self.next < len(self.rows) and self.rows[self.next][2] < self.passed:
            extent, _, last_step = self.rows[self.next]
            self.next += 1
            yield extent, last_step
