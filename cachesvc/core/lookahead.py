"""Look-ahead: fills in the order in which plans need them, as far ahead as room, slots and the pace allow.

A plan's window is the entries between what was passed and what was entered. Entering counts a need on the
extent, which protects its copy; leaving takes it back. An absent extent is entered when its fill starts.

Where everything fits, the cold part of a plan runs ahead as far as it finds room. Where part of it streams, the
plans of one order together have at most their part of the window fetched and not yet read, and fetch it along a
schedule (`schedule.py`), so that the source sees an even rate over the whole plan. A schedule holds nobody up:
while a reader waits for a fill, only room and slots limit its plans. Over what is resident, or fits no tier that
works, a window goes `window_bytes` ahead and no further, so that one event never walks a whole plan. A long plan is
scheduled, and its end done, in steps between other events; until it is scheduled it enters nothing, and readers
fetch for themselves. So is a cursor that moves far, as in a resume; until all that it passed is given up, its plan
enters nothing either.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np

from cachesvc.core.copies import Copies
from cachesvc.core.events import Passed, Planned
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.policy import Asked
from cachesvc.core.retain import STRETCHES, Retention
from cachesvc.core.schedule import schedule
from cachesvc.core.state import Copy, Entry, EpochTally, Phase, Plan, Role, Window
from cachesvc.core.steps import Steps, Work

FEED_LIMIT = 64
"""Entries looked at in one event: well under a millisecond, so that grants never wait for a long plan."""
MAX_STEP = 1 << 48
"""What a plan says beyond is as far away as this: steps come from readers and may be any number."""


class Lookahead:
    """Plans by number, and what the plans of one order share, by the extents that the order begins with."""

    def __init__(self, copies: Copies, steps: Steps) -> None:
        self._copies = copies
        self._policy = copies.policy
        self._reserve = copies.policy.reserve
        self._moment = copies.moment
        self._steps = steps
        self.plans: dict[int, Plan] = {}
        self.ending: set[Plan] = set()
        """Plans that have ended, while what their windows protect is given up."""
        self._windows: dict[frozenset[ExtentId], Window] = {}
        self._turn = 0

    def begin(self, event: Planned) -> None:
        """Take up a plan, in place of an older one of the same number. What was consumed before it began here is not
        of this daemon's epoch."""
        number, entries = event.plan, event.entries
        self.end(number)
        first = frozenset(extent for extent, step, _ in entries[:FEED_LIMIT] if step == entries[0][1])
        shared = self._windows.setdefault(first, Window())
        shared.plans.add(number)
        tally = self._tally(event)
        plan = self.plans[number] = Plan(number, event.job, entries, self._moment.now, shared, tally)
        plan.passed = event.passed
        for _ in plan.skip_passed():
            pass
        if entries and self._reserve.streams:
            plan.paced, retention = False, None
            if len(event.following) >= STRETCHES and shared.retention is None:
                retention = shared.retention = Retention(event.following)
            count = max(len(entries), len(event.following))
            self._steps.do((Work.PACE, number), self._pace(plan, retention), count)

    def end(self, number: int) -> None:
        """Give up a plan and what its window protects."""
        plan = self.plans.pop(number, None)
        if plan:
            self._steps.drop((Work.PACE, number))
            self._steps.drop((Work.PASS, number))
            self.ending.add(plan)
            self._steps.do((Work.END, plan), self._end(plan), len(plan.entries))
            plan.shared.plans.discard(number)
            self._windows = {first: each for first, each in self._windows.items() if each.plans}
            self._retune()

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

    def feed(self) -> bool:
        """Enter entries, the most urgent plan first, until each plan waits or is at its end.

        Where the most urgent absent extent finds no slot or room, no later one takes it; only what is
        resident is entered then. False when `FEED_LIMIT` was reached and there is more to do.
        """
        urgent = [
            plan.urgency for plan in self.plans.values() if plan.paced and not plan.behind and not plan.ended
        ]
        heapq.heapify(urgent)
        held_up = any(copy.entry.waiters for copy in self._copies.filling)
        room = True
        for _ in range(FEED_LIMIT):
            if not urgent:
                return True
            plan = self.plans[heapq.heappop(urgent)[-1]]
            extent, _, last_step = plan.entries[plan.next]
            entry = self._copies.entry(extent)
            if entry is None:
                plan.next += 1
            elif last_step < plan.passed:  # consumed, behind one that is not yet
                self._count(plan, extent)
                plan.next += 1
            elif not _absent(entry) or not self._policy.fits(entry):
                if plan.entered_bytes >= self._reserve.window_bytes or not self._promote(entry):
                    continue
                self._enter(plan, entry)
            else:
                room = room and self._may_fetch(plan, entry, held_up) and self._fill(plan, entry)
                if not room:
                    continue
                self._enter(plan, entry)
            if not plan.ended:
                heapq.heappush(urgent, plan.urgency)
        return not urgent

    def _enter(self, plan: Plan, entry: Entry) -> None:
        # a schedule bounds how far a plan goes over what stays where it is
        free = plan.schedule is not None and entry.ready and entry.kept
        plan.enter(0 if free else entry.size_bytes)
        entry.needs += 1
        if entry.needs == 1:
            self._resettle(entry, spent=False)

    def _may_fetch(self, plan: Plan, entry: Entry, held_up: bool) -> bool:
        """Whether an absent extent's turn has come."""
        if not self._reserve.streams:
            return True
        if self._reserve.tight:
            return self._policy.room_to_keep(entry)
        if not self._has_room(plan.shared, entry.size_bytes):
            return False
        if plan.schedule is None or (held_up and plan.passed):
            return True
        return plan.schedule.allows(plan.next, plan.passed)

    def _has_room(self, window: Window, size_bytes: int) -> bool:
        """Whether so much more may be ahead in a window: within its part, or, where orders are too many for parts of an
        extent, the only extent in it."""
        every, ahead = self._reserve.ahead_bytes(), window.ahead_bytes
        if ahead + size_bytes <= every // len(self._windows):
            return True
        return not ahead and size_bytes + sum(each.ahead_bytes for each in self._windows.values()) <= every

    def _fill(self, plan: Plan, entry: Entry) -> bool:
        """Start a fill from the source; False when it must wait for a slot or for room."""
        if self._copies.busy or self._yield_to(plan, entry):
            return False
        if not self._copies.carry_out(self._policy.place(entry, Asked.PLAN), entry, ahead_of=plan.shared):
            return False
        self._turn = plan.shared.turn = self._turn + 1
        return True

    def _promote(self, entry: Entry) -> bool:
        """Start a fill from NVMe into RAM where that is free; False when it must wait for an eviction. Where part
        streams, the room of the window is for what is absent, and what lies on NVMe is read there."""
        copy = entry.best()
        if self._reserve.streams or copy is None or not copy.committed or copy.tier.name == RAM:
            return True
        if self._copies.busy:
            return True
        place = self._policy.promote(entry)
        self._copies.carry_out(place, entry, source=copy)
        return not place.coming

    def _leave(self, plan: Plan, extent: ExtentId, done: bool = False) -> None:
        entry = self._copies.entries[extent]
        entry.needs -= 1
        if not entry.needs:
            for copy in entry.copies:
                self._copies.not_ahead(copy)
            self._resettle(entry, spent=bool(entry.datasets))
            if done and plan.shared.retention is not None:
                kept = next((copy for copy in entry.copies if copy.role is Role.KEPT), None)
                plan.shared.retention.passed(extent, kept)
            self._copies.forget(entry)

    def _resettle(self, entry: Entry, spent: bool) -> None:
        for copy in tuple(entry.copies):
            if copy.phase is Phase.RESIDENT:
                self._copies.settle(copy, spent)

    # Pacing, keeping, and what is told of epochs

    def _yield_to(self, plan: Plan, entry: Entry) -> bool:
        """Whether a kept copy goes so that an absent extent may be kept in its place."""
        retention = plan.shared.retention
        if retention is None or self._policy.room_to_keep(entry, free=False):
            return False
        kept = retention.instead_of(entry, _gives_place)
        if kept is not None:
            self._copies.evict(kept)
        return kept is not None

    def _pace(self, plan: Plan, retention: Retention | None) -> Iterator[None]:
        """Find out what a plan reads side by side and what of it is absent, and schedule that; gives way after each
        step."""
        step, opened, total_bytes = self._steps.size, Opened(), 0
        first, costs = np.zeros(len(plan.entries), np.int64), np.zeros(len(plan.entries), np.int64)
        for start in range(0, len(plan.entries), step):
            rows = plan.entries[start : start + step]
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
        plan.shared.open_bytes = max(plan.shared.open_bytes, opened.most_bytes)
        absent_bytes = opened.most_bytes * int(costs.sum()) // max(1, total_bytes)
        plan.shared.absent_bytes = max(plan.shared.absent_bytes, absent_bytes)
        self._retune()
        every = self._reserve.ahead_bytes()
        room = max(every // len(self._windows), min(every, self._reserve.largest_bytes))
        plan.schedule = schedule(first, costs, room) if costs.any() and room else None
        plan.paced = True

    def _is_kept(self, extent: ExtentId) -> bool:
        entry = self._copies.entries.get(extent)
        return entry is not None and entry.kept

    def _pass(self, plan: Plan) -> Iterator[None]:
        """Give up what is before its cursor, wherever that is by then; gives way after each step."""
        for count, _ in enumerate(self._pass_each(plan), start=1):
            if not count % self._steps.size:
                yield
        plan.behind = False

    def _pass_each(self, plan: Plan) -> Iterator[None]:
        for extent in plan.leave():
            self._count(plan, extent)
            self._leave(plan, extent, done=True)
            yield
        for extent in plan.skip_passed():
            self._count(plan, extent)
            yield

    def _end(self, plan: Plan) -> Iterator[None]:
        """Give up what its window protects, then its rows: to free a million at once would take 100 ms. What it had
        passed counts for its epoch all the same."""
        if plan.behind:
            yield from self._pass(plan)
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

    def _retune(self) -> None:
        windows = self._windows.values()
        self._reserve.reads(
            sum(each.open_bytes for each in windows), sum(each.absent_bytes for each in windows)
        )

    def _tally(self, event: Planned) -> EpochTally | None:
        """The epoch that a plan belongs to: a number that was in the latest one begins another."""
        entry = self._copies.entries.get(event.entries[0][0]) if event.entries else None
        home = entry.home(event.job) if entry else None
        if home is None:
            return None
        number, epochs = event.plan, home.epochs
        if not epochs or number in epochs[-1].plans:
            bound = self._policy.shares.bound_of(home)
            epochs.append(EpochTally(epochs[-1].number + 1 if epochs else 0, bound))
        epochs[-1].plans.add(number)
        return epochs[-1]

    def _count(self, plan: Plan, extent: ExtentId) -> None:
        entry = self._copies.entry(extent)
        if plan.tally is not None and entry is not None:
            plan.tally.touched += 1
            plan.tally.hits += entry.sourced_at < plan.began_at


def _absent(entry: Entry) -> bool:
    """Nothing is there and nothing is on its way; what failed waits for a reader to ask."""
    on_its_way = entry.waiters or entry.due_at is not None or entry.filling()
    return not (entry.ready or entry.failed or on_its_way)


def _gives_place(copy: Copy) -> bool:
    """A kept copy that nobody uses, needs or pins."""
    unused = copy.usable and copy.idle and not copy.entry.needs
    return copy.role is Role.KEPT and unused and not copy.entry.pinned


def _cost(entry: Entry | None) -> int:
    """What an entry will cost the source: nothing where it is kept."""
    if entry is None or any(copy.role is Role.KEPT and copy.usable for copy in entry.copies):
        return 0
    return entry.size_bytes


class Opened:
    """The most bytes of entries whose steps overlap: what has begun less what has ended, at each beginning."""

    def __init__(self) -> None:
        self.most_bytes = 0
        self._open_bytes = 0
        self._ends: list[int] = []
        """Heap of the last steps of what is open."""
        self._ending_bytes: dict[int, int] = {}

    def add(self, size_bytes: int, first_step: int, last_step: int) -> None:
        """The next entry, in the order of first steps."""
        while self._ends and self._ends[0] < first_step:
            self._open_bytes -= self._ending_bytes.pop(heapq.heappop(self._ends))
        if last_step not in self._ending_bytes:
            heapq.heappush(self._ends, last_step)
        self._ending_bytes[last_step] = self._ending_bytes.get(last_step, 0) + size_bytes
        self._open_bytes += size_bytes
        self.most_bytes = max(self.most_bytes, self._open_bytes)
