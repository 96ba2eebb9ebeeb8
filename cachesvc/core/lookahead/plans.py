"""Plans: where each cursor is, what its window protects, and what is told of its epoch.

A plan's window is the entries between what was passed and what was entered. Entering counts a need on the
extent, which protects its copy; leaving takes it back. What a cursor that moves far leaves behind, as in a resume, is
given up in steps between other events, and so is a long plan at its end.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice

from cachesvc.core.events import Passed, PlanEnded, Planned
from cachesvc.core.lookahead import epoch_tally as epochs
from cachesvc.core.lookahead.pacing import Pacing
from cachesvc.core.lookahead.plan_windows import Windows
from cachesvc.core.model import ExtentId
from cachesvc.core.records.incremental import Steps, Work
from cachesvc.core.records.state import Dataset, Entry, Plan, Role
from cachesvc.core.tiering.copies import Copies


class Plans:
    """Plans by number."""

    def __init__(self, copies: Copies, steps: Steps, windows: Windows) -> None:
        self._copies = copies
        self._policy = copies.policy
        self._moment = copies.moment
        self._steps = steps
        self._windows = windows
        self._pacing = Pacing(copies, steps, windows)
        self.plans: dict[int, Plan] = {}
        self._jobs = Counter[int]()
        """How many plans each job has; a job is known by its turn in the readers' queue (`Demanded.job`)."""
        self.ending: set[Plan] = set()
        """Plans that have ended, while what their windows protect is given up."""

    def begin(self, event: Planned) -> None:
        """Take up a plan, in place of an older one of the same number. What was consumed before it began here is not
        of this daemon's epoch."""
        number, entries = event.plan, event.entries
        self.end(number)
        shared = self._windows.join(number, entries, event.user)
        plan = self.plans[number] = Plan(number, event.job, entries, shared, event.launch)
        self._jobs[event.launch or number] += 1
        if (home := self._home(event)) is not None:
            plan.tally, plan.counted = epochs.join(event, home, self._policy.shares, self._moment.now)
        plan.passed = event.passed
        for _ in plan.skip_passed():
            pass
        if entries and self._policy.reserve.streams:
            self._pacing.begin(plan, event.following)

    def end(self, number: int) -> None:
        """Give up a plan and what its window protects."""
        plan = self.plans.pop(number, None)
        if plan:
            self._steps.drop((Work.PACE, number))
            self._steps.drop((Work.PASS, number))
            self.ending.add(plan)
            job = plan.launch or number
            self._jobs[job] -= 1
            if not self._jobs[job]:
                del self._jobs[job]
            if plan.tally is not None:
                plan.tally.running.discard(number)
            retention = plan.shared.retention
            count = max(len(plan.entries), len(retention.following) if retention else 0)
            self._steps.do((Work.END, plan), self._end(plan), count)
            self._windows.leave(plan)

    def of_job(self, job: int) -> int:
        """How many plans a job has."""
        return self._jobs[job]

    def ended(self, event: PlanEnded) -> None:
        """A rank gave its plan up or came to its end."""
        self.end(event.plan)

    def end_job(self, job: int) -> None:
        """Give up a job's plans."""
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
                self._steps.begin((Work.PASS, plan.number), work)

    def enter(self, plan: Plan, entry: Entry) -> None:
        """Take a plan's next entry into its window, which protects it from here on."""
        # a schedule bounds how far a plan goes over what stays where it is
        free = plan.schedule is not None and entry.ready and entry.kept
        plan.enter(0 if free else entry.size_bytes)
        self._copies.need(entry)

    def skip(self, plan: Plan, extent: ExtentId) -> None:
        """Move over a plan's next entry: it was consumed, behind one that is not yet, or nobody knows it."""
        self._count(plan, extent, plan.entries[plan.next][2])
        plan.next += 1

    def _leave(self, plan: Plan, extent: ExtentId, done: bool = False) -> None:
        entry = self._copies.entries[extent]
        self._copies.unneed(entry)
        if not entry.needs:
            if done and plan.shared.retention is not None:
                kept = next((copy for copy in entry.copies if copy.role is Role.KEPT), None)
                plan.shared.retention.passed(extent, kept)
            self._copies.forget(entry)

    def _pass(self, plan: Plan) -> Iterator[None]:
        """Give up what is before its cursor, wherever that is by then; gives way after each step."""
        step = self._steps.size
        for _ in islice(self._pass_each(plan), step - 1, None, step):
            yield
        plan.behind = False

    def _pass_each(self, plan: Plan) -> Iterator[None]:
        for extent, last_step in plan.leave():
            self._count(plan, extent, last_step)
            self._leave(plan, extent, done=True)
            yield
        for extent, last_step in plan.skip_passed():
            self._count(plan, extent, last_step)
            yield

    def _end(self, plan: Plan) -> Iterator[None]:
        """Give up what its window protects, then its rows, and what is counted of the order after it: to free a million
        at once would take 100 ms. What it had passed counts for its epoch all the same."""
        if plan.behind:
            yield from self._pass(plan)
        epochs.left(plan)
        step = self._steps.size
        while plan.window:
            for _, index, _ in plan.window[-step:]:
                plan.window.pop()
                self._leave(plan, plan.entries[index][0])
            yield
        self.ending.remove(plan)
        rows, plan.entries = list(plan.entries), ()
        while rows:
            yield
            del rows[-step:]
        if plan.shared.retention is not None and not plan.shared.plans:
            yield from plan.shared.retention.end(step)

    def _home(self, event: Planned) -> Dataset | None:
        """The dataset that a plan goes through."""
        entry = self._copies.entries.get(event.entries[0][0]) if event.entries else None
        return entry.home(event.job) if entry else None

    def _count(self, plan: Plan, extent: ExtentId, last_step: int) -> None:
        plan.shared.moved_at = self._moment.now
        entry = self._copies.entry(extent)
        if plan.tally is not None and entry is not None and last_step >= plan.counted:
            plan.tally.touched += 1
            plan.tally.hits += entry.sourced_at < plan.tally.began_at
