"""Look-ahead: fills in the order in which plans need them, as far ahead as room and slots allow.

A plan's window is the entries between what was passed and what was entered. Entering counts a need on the
extent, which protects its copy; leaving takes it back. An absent extent is entered when its fill starts, so
the cold part of a plan runs ahead as far as it finds room; over what is resident the window goes
`window_bytes` ahead and no further, so that one event never walks a whole plan.
"""

from __future__ import annotations

import heapq

from cachesvc.core.copies import Copies
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.policy import Asked
from cachesvc.core.state import Entry, Phase, Plan

FEED_LIMIT = 64
"""Entries looked at in one event: well under a millisecond, so that grants never wait for a long plan."""


class Lookahead:
    """Plans by number."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._policy = copies.policy
        self.plans: dict[int, Plan] = {}

    def begin(self, number: int, job: int, entries: tuple[tuple[ExtentId, int, int], ...]) -> None:
        """Take up a plan, in place of an older one of the same number."""
        self.end(number)
        self.plans[number] = Plan(number, job, entries)

    def end(self, number: int) -> None:
        """Give up a plan and what its window protects."""
        plan = self.plans.pop(number, None)
        if plan:
            for _, index in plan.window:
                self._leave(plan, plan.entries[index][0])

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
                self._leave(plan, extent)

    def feed(self, now: float) -> bool:
        """Enter entries, the most urgent plan first, until each plan waits or is at its end.

        Where the most urgent absent extent finds no slot or room, no later one takes it; only what is
        resident is entered then. False when `FEED_LIMIT` was reached and there is more to do.
        """
        urgent = [(plan.lead_steps, plan.number) for plan in self.plans.values() if plan.skip_passed()]
        heapq.heapify(urgent)
        room = True
        for _ in range(FEED_LIMIT):
            if not urgent:
                return True
            plan = self.plans[heapq.heappop(urgent)[1]]
            entry = self._copies.entries.get(plan.entries[plan.next][0])
            if entry is None:
                plan.next += 1
            elif not _absent(entry):
                if plan.entered_bytes >= self._policy.window_bytes or not self._promote(entry):
                    continue
                self._enter(plan, entry)
            else:
                room = room and self._fill(entry, now)
                if not room:
                    continue
                self._enter(plan, entry)
            if plan.skip_passed():
                heapq.heappush(urgent, (plan.lead_steps, plan.number))
        return not urgent

    def _enter(self, plan: Plan, entry: Entry) -> None:
        plan.enter(entry.size_bytes)
        entry.needs += 1
        if entry.needs == 1:
            self._resettle(entry, spent=False)

    def _fill(self, entry: Entry, now: float) -> bool:
        """Start a fill from the source; False when it must wait for a slot or for room."""
        if self._copies.slots <= 0:
            return False
        place = self._policy.place(entry, Asked.PLAN, now)
        for victim in place.victims:
            self._copies.evict(victim)
        if place.tier is not None:
            self._copies.start(entry, place.tier, place.role).fresh = True
            return True
        budgets = (tier.budget_bytes for tier in self._policy.tiers.values())
        return entry.size_bytes > max(budgets, default=0)

    def _promote(self, entry: Entry) -> bool:
        """Start a fill from NVMe into RAM where that is free; False when it must wait for an eviction."""
        copy = entry.best()
        if copy is None or not copy.committed or copy.tier.name == RAM or self._copies.slots <= 0:
            return True
        place = self._policy.promote(entry)
        for victim in place.victims:
            self._copies.evict(victim)
        if place.tier is not None:
            self._copies.start(entry, place.tier, place.role, source=copy)
        return not (place.victims or place.soon)

    def _leave(self, plan: Plan, extent: ExtentId) -> None:
        entry = self._copies.entries[extent]
        plan.entered_bytes -= entry.size_bytes
        entry.needs -= 1
        if not entry.needs:
            self._resettle(entry, spent=bool(entry.datasets))
            self._copies.forget(entry)

    def _resettle(self, entry: Entry, spent: bool) -> None:
        for copy in tuple(entry.copies):
            if copy.phase is Phase.RESIDENT:
                self._copies.settle(copy, spent)


def _absent(entry: Entry) -> bool:
    """Nothing is there and nothing is on its way; what failed waits for a reader to ask."""
    on_its_way = entry.waiters or entry.due_at is not None or entry.filling()
    return not (entry.ready or entry.failed or on_its_way)
