"""Look-ahead: fills in the order in which plans need them, as far ahead as room and slots allow.

A plan's window is the entries between what was passed and what was entered. Entering counts a need on the
extent, which protects its copy; leaving takes it back. An absent extent is entered when its fill starts, so
the cold part of a plan runs ahead as far as it finds room; over what is resident the window goes
`window_bytes` ahead and no further, so that one event never walks a whole plan.
"""

from __future__ import annotations

from cachesvc.core.copies import Copies
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.policy import Asked
from cachesvc.core.state import Entry, Phase, Plan


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

    def feed(self, now: float) -> None:
        """Enter entries, the most urgent plan first, until each plan waits or is at its end."""
        open_plans = [plan for plan in self.plans.values() if plan.skip_passed()]
        while open_plans:
            plan = min(open_plans, key=lambda each: each.lead_steps)
            if not self._enter(plan, now) or not plan.skip_passed():
                open_plans.remove(plan)

    def _enter(self, plan: Plan, now: float) -> bool:
        """Take one entry into the window, with its fill; False when the plan must wait."""
        entry = self._copies.entries.get(plan.entries[plan.next][0])
        if entry is None:
            plan.next += 1
            return True
        if entry.ready or entry.failed or entry.waiters or entry.due_at is not None or entry.filling():
            if plan.entered_bytes >= self._policy.window_bytes or not self._promote(entry):
                return False
        elif not self._fill(entry, now):
            return False
        plan.enter(entry.size_bytes)
        entry.needs += 1
        if entry.needs == 1:
            self._resettle(entry, spent=False)
        return True

    def _fill(self, entry: Entry, now: float) -> bool:
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
        if copy is None or copy.tier.name == RAM or self._copies.slots <= 0:
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
