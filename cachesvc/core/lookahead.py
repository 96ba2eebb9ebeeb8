"""Look-ahead: fills in the order in which plans need them, as far ahead as room, slots and the pace allow.

A plan's window is the entries between what was passed and what was entered. Entering counts a need on the
extent, which protects its copy; leaving takes it back. An absent extent is entered when its fill starts.

Where everything fits, the cold part of a plan runs ahead as far as it finds room. Where part of it streams, the
plans of one order together have at most their part of the window fetched and not yet read, and fetch it along
a schedule (`schedule.py`), so that the source sees an even rate over the whole plan. A schedule holds nobody up:
while a reader waits for a fill, only room and slots limit its plans. Over what is resident a window goes
`window_bytes` ahead and no further, so that one event never walks a whole plan.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from cachesvc.core.copies import Copies
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.policy import Asked
from cachesvc.core.retain import STRETCHES, Retention
from cachesvc.core.schedule import I64, schedule
from cachesvc.core.state import Copy, Entry, EpochTally, Phase, Plan, Role, Window

FEED_LIMIT = 64
"""Entries looked at in one event: well under a millisecond, so that grants never wait for a long plan."""
MAX_STEP = 1 << 48
"""What a plan says beyond is as far away as this: steps come from readers and may be any number."""
Entries = tuple[tuple[ExtentId, int, int], ...]


class Lookahead:
    """Plans by number, and what the plans of one order share, by the extents that the order begins with."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._policy = copies.policy
        self.plans: dict[int, Plan] = {}
        self._windows: dict[frozenset[ExtentId], Window] = {}

    def begin(
        self, number: int, job: int, entries: Entries, following: Sequence[ExtentId], now: float
    ) -> None:
        """Take up a plan, in place of an older one of the same number."""
        self.end(number)
        first = frozenset(extent for extent, step, _ in entries[:FEED_LIMIT] if step == entries[0][1])
        shared = self._windows.setdefault(first, Window())
        shared.plans.add(number)
        plan = self.plans[number] = Plan(number, job, entries, now, shared, self._tally(number, entries))
        if entries and self._policy.streams:
            self._pace(plan)
            if len(following) >= STRETCHES and shared.retention is None:
                shared.retention = Retention(
                    following, lambda each: self._keeps(self._copies.entries.get(each))
                )

    def skip(self, number: int, step: int) -> None:
        """Begin in the middle: what was consumed before is not of this daemon's epoch."""
        plan = self.plans[number]
        plan.passed = step
        for _ in plan.skip_passed():
            pass

    def end(self, number: int) -> None:
        """Give up a plan and what its window protects."""
        plan = self.plans.pop(number, None)
        if plan:
            for _, index, _ in plan.window:
                self._leave(plan, plan.entries[index][0])
            plan.shared.plans.discard(number)
            self._windows = {first: each for first, each in self._windows.items() if each.plans}
            self._retune()

    def end_job(self, job: int) -> None:
        """Give up a job's plans."""
        for number in [plan.number for plan in self.plans.values() if plan.job == job]:
            self.end(number)

    def passed(self, number: int, step: int) -> None:
        """Move a plan's cursor; it never goes back."""
        plan = self.plans.get(number)
        if plan and step > plan.passed:
            plan.passed = step
            for extent in plan.leave():
                self._count(plan, extent)
                self._leave(plan, extent, done=True)
            for extent in plan.skip_passed():
                self._count(plan, extent)

    def feed(self, now: float) -> bool:
        """Enter entries, the most urgent plan first, until each plan waits or is at its end.

        Where the most urgent absent extent finds no slot or room, no later one takes it; only what is
        resident is entered then. False when `FEED_LIMIT` was reached and there is more to do.
        """
        urgent = [(plan.lead_steps, plan.number) for plan in self.plans.values() if not plan.ended]
        heapq.heapify(urgent)
        held_up = any(copy.entry.waiters for copy in self._copies.filling)
        room = True
        for _ in range(FEED_LIMIT):
            if not urgent:
                return True
            plan = self.plans[heapq.heappop(urgent)[1]]
            entry = self._copies.entry(plan.entries[plan.next][0])
            if entry is None:
                plan.next += 1
            elif not _absent(entry):
                if plan.entered_bytes >= self._policy.window_bytes or not self._promote(entry):
                    continue
                self._enter(plan, entry)
            else:
                room = room and self._may_fetch(plan, entry, held_up) and self._fill(plan, entry, now)
                if not room:
                    continue
                self._enter(plan, entry)
            if not plan.ended:
                heapq.heappush(urgent, (plan.lead_steps, plan.number))
        return not urgent

    def _enter(self, plan: Plan, entry: Entry) -> None:
        # a schedule bounds how far a plan goes over what stays where it is
        free = plan.schedule is not None and entry.ready and self._keeps(entry)
        plan.enter(0 if free else entry.size_bytes)
        entry.needs += 1
        if entry.needs == 1:
            self._resettle(entry, spent=False)

    def _may_fetch(self, plan: Plan, entry: Entry, held_up: bool) -> bool:
        """Whether an absent extent's turn has come."""
        if not self._policy.streams:
            return True
        if self._policy.tight:
            return self._policy.room_to_keep(entry)
        most = self._policy.ahead_bytes() // len(self._windows)
        if plan.shared.ahead_bytes + entry.size_bytes > most:
            return False
        if plan.schedule is None or (held_up and plan.passed):
            return True
        return plan.schedule.allows(plan.next, plan.passed)

    def _fill(self, plan: Plan, entry: Entry, now: float) -> bool:
        """Start a fill from the source; False when it must wait for a slot or for room."""
        if self._copies.slots <= 0 or self._yield_to(plan, entry):
            return False
        place = self._policy.place(entry, Asked.PLAN, now)
        for victim in place.victims:
            self._copies.evict(victim)
        if place.tier is not None:
            self._copies.start(entry, place.tier, place.role, ahead_of=plan.shared)
            return True
        budgets = (tier.budget_bytes for tier in self._policy.tiers.values())
        return entry.size_bytes > max(budgets, default=0)

    def _promote(self, entry: Entry) -> bool:
        """Start a fill from NVMe into RAM where that is free; False when it must wait for an eviction. Where part
        streams, the room of the window is for what is absent, and what lies on NVMe is read there."""
        copy = entry.best()
        if self._policy.streams or copy is None or not copy.committed or copy.tier.name == RAM:
            return True
        if self._copies.slots <= 0:
            return True
        place = self._policy.promote(entry)
        for victim in place.victims:
            self._copies.evict(victim)
        if place.tier is not None:
            self._copies.start(entry, place.tier, place.role, source=copy)
        return not (place.victims or place.soon)

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

    def _keeps(self, entry: Entry | None) -> bool:
        return entry is not None and any(copy.role is Role.KEPT for copy in entry.copies)

    def _yield_to(self, plan: Plan, entry: Entry) -> bool:
        """Whether a kept copy goes so that an absent extent may be kept in its place."""
        retention = plan.shared.retention
        if retention is None or self._policy.room_to_keep(entry, free=False):
            return False
        kept = retention.instead_of(entry, _gives_place)
        if kept is not None:
            self._copies.evict(kept)
        return kept is not None

    def _pace(self, plan: Plan) -> None:
        """Find out what a plan reads side by side and what of it is absent, and schedule that."""
        known = [self._copies.entry(extent) for extent, _, _ in plan.entries]
        sizes = np.array([entry.size_bytes if entry else 0 for entry in known], np.int64)
        costs = np.array([_cost(entry) for entry in known], np.int64)
        first = np.array([min(step, MAX_STEP) for _, step, _ in plan.entries], np.int64)
        last = np.array([min(step, MAX_STEP) for _, _, step in plan.entries], np.int64)
        plan.shared.open_bytes = max(plan.shared.open_bytes, _open_bytes(first, last, sizes))
        self._retune()
        room = self._policy.ahead_bytes() // len(self._windows)
        plan.schedule = schedule(first, costs, room) if costs.any() and room else None

    def _retune(self) -> None:
        self._policy.open_bytes = sum(window.open_bytes for window in self._windows.values())
        self._policy.retune()

    def _tally(self, number: int, entries: Entries) -> EpochTally | None:
        """The epoch that a plan belongs to: a number that was in the latest one begins another."""
        entry = self._copies.entries.get(entries[0][0]) if entries else None
        if entry is None or not entry.datasets:
            return None
        home = entry.datasets[0]
        epochs = home.epochs
        if not epochs or number in epochs[-1].plans:
            bound = self._policy.bound_of(home)
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


def _open_bytes(first: I64, last: I64, sizes: I64) -> int:
    """The most bytes of entries whose steps overlap: what has begun less what has ended, at each beginning."""
    begun = np.concatenate(([0], np.cumsum(sizes)))[np.searchsorted(first, first, side="right")]
    by_end = np.argsort(last, kind="stable")
    ended = np.concatenate(([0], np.cumsum(sizes[by_end])))[np.searchsorted(last[by_end], first, side="left")]
    return int((begun - ended).max())
