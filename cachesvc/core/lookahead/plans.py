"""Plans: their cursors, what their entered rows protect, and what is counted of their epochs.

A row is entered when look-ahead reaches it, and left when the plan's cursor, which is what its rank has consumed, passes
it. Between the two it counts as a need of its extent, which protects the extent's copies. A cursor that moves far, as in a
resume, leaves a backlog of rows that is given up in steps between other events. So is a long plan at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from cachesvc.core.events import Passed, PlanEnded, Planned
from cachesvc.core.lookahead import epoch_tally as epochs
from cachesvc.core.lookahead.order_windows import OrderWindows
from cachesvc.core.lookahead.pacing import Pacing
from cachesvc.core.lookahead.plan_state import PlanState
from cachesvc.core.model import ExtentId
from cachesvc.core.records.cache_entry import CacheEntry, Role
from cachesvc.core.records.dataset_state import DatasetState
from cachesvc.core.records.incremental import IncrementalWork, WorkKind
from cachesvc.core.tiering.copies import Copies


class Plans:
    """Plans by number."""

    def __init__(self, copies: Copies, work: IncrementalWork, windows: OrderWindows) -> None:
        self._copies = copies
        self._policy = copies.policy
        self._context = copies.context
        self._work = work
        self._windows = windows
        self._pacing = Pacing(copies, work, windows)
        self.plans: dict[int, PlanState] = {}
        self._launches = Counter[int]()
        """How many plans each launch has; a plan without one counts under its own number, as in the readers' queue."""
        self.ending: set[PlanState] = set()
        """Plans that have ended, while their entered rows are given up."""

    def begin(self, event: Planned) -> None:
        """Begin a plan, in place of an older one of the same number. Rows that were consumed before it began here are not
        counted in its epoch."""
        number, entries = event.plan, event.rows
        self.end(number)
        shared = self._windows.join(number, entries, event.user)
        plan = self.plans[number] = PlanState(number, event.job, entries, shared, event.launch)
        self._launches[event.launch or number] += 1
        if (home := self._home(event)) is not None:
            plan.tally, plan.counted_before = epochs.join(event, home, self._policy.shares, self._context.now)
        plan.passed = event.passed
        for _ in plan.skip_passed():
            pass
        if entries and (self._policy.reserve.streams or self._policy.reserve.ahead_of_nvme):
            self._pacing.begin(plan, event.following)

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
            self._windows.leave(plan)

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

    def enter(self, plan: PlanState, entry: CacheEntry) -> None:
        """Enter a plan's next row, which protects its extent from here on."""
        # kept extents are free: a schedule limits how far a plan goes over them
        free = plan.schedule is not None and entry.ready and entry.kept
        plan.enter(0 if free else entry.size_bytes)
        self._copies.need(entry)

    def skip(self, plan: PlanState, extent: ExtentId) -> None:
        """Skip a plan's next row: it was consumed before a row that is not yet, or its extent is unknown."""
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
        epochs.leave(plan)
        step = self._work.size
        while plan.entered:
            for _, index, _ in plan.entered[-step:]:
                plan.entered.pop()
                self._leave(plan, plan.rows[index][0])
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
