"""Look-ahead: fills in the order in which plans need them, as far ahead as room, slots and the pace allow.

An absent extent is entered when its fill starts. Where everything fits, the cold part of a plan runs ahead as far as it
finds room. Where part of it streams, the plans of one order together have at most their part of the window fetched and
not yet read (`order_windows.py`), and fetch it along a schedule (`core/records/schedule.py`), so that the source sees an
even rate over the whole plan. A schedule holds nobody up: while a reader waits for a fill, only room and slots limit
its plans. Over what is resident, or fits no tier that works, a window goes `window_bytes` ahead and no further, so that
one event never walks a whole plan. A plan that is not scheduled yet, or whose cursor has left much behind, enters
nothing, and readers fetch for themselves."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque

from cachesvc.core.lookahead.order_windows import OrderWindows
from cachesvc.core.lookahead.plan_state import PlanState
from cachesvc.core.lookahead.plans import Plans
from cachesvc.core.model import RAM
from cachesvc.core.records.cache_entry import CacheEntry, Copy, Role
from cachesvc.core.records.order_window import OrderWindow
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.policy import Requester

FEED_LIMIT = 64
"""Entries looked at in one event: well under a millisecond, so that grants never wait for a long plan."""


class Lookahead:
    """Chooses what plans fetch next."""

    def __init__(self, copies: Copies, plans: Plans, windows: OrderWindows) -> None:
        self._copies = copies
        self._policy = copies.policy
        self._reserve = copies.policy.reserve
        self._plans = plans
        self._windows = windows

    def feed(self) -> bool:
        """Enter entries, users in turn and of each the most urgent plan first, until each plan waits or is at its end.

        Where a user's most urgent absent extent finds no slot or room, no later one of that user takes it; only what is
        resident is entered then. False when `FEED_LIMIT` was reached and there is more to do; where all that many plans
        wait, there is nothing before another event.
        """
        plans = self._plans.plans
        taking = self._windows.taking()
        users: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for each in plans.values():
            if each.paced and not each.behind and not each.exhausted and each.window in taking:
                users[each.window.user].append(each.urgency)
        for urgent in users.values():
            heapq.heapify(urgent)
        turns = deque(sorted(users, key=self._windows.turn_of))
        held_up = any(copy.entry.waiters for copy in self._copies.filling)
        waiting, moved = set[int](), False
        for _ in range(FEED_LIMIT):
            while turns and not users[turns[0]]:
                turns.popleft()
            if not turns:
                return True
            user = turns[0]
            turns.rotate(-1)
            plan = plans[heapq.heappop(users[user])[-1]]
            extent, _, last_step = plan.rows[plan.next]
            entry = self._copies.entry(extent)
            if entry is None or last_step < plan.passed:
                self._plans.skip(plan, extent)
            elif not _absent(entry) or not self._policy.fits(entry):
                if plan.entered_bytes >= self._reserve.window_bytes or not self._promote(entry):
                    continue
                self._plans.enter(plan, entry)
            else:
                if user in waiting or not (self._may_fetch(plan, entry, held_up) and self._fill(plan, entry)):
                    waiting.add(user)
                    continue
                self._plans.enter(plan, entry)
            moved = True
            if not plan.exhausted:
                heapq.heappush(users[user], plan.urgency)
        return not moved or not any(users.values())

    def _may_fetch(self, plan: PlanState, entry: CacheEntry, held_up: bool) -> bool:
        """Whether an absent extent's turn has come."""
        if not self._reserve.streams:
            return True
        if self._reserve.tight_for(plan.window.user):
            return self._policy.room_to_keep(entry)
        schedule = None if held_up and plan.passed else plan.schedule
        if schedule is not None and not schedule.allows(plan.next, plan.passed):
            return False
        return self._has_room(plan.window, entry)

    def _has_room(self, window: OrderWindow, entry: CacheEntry) -> bool:
        if self._windows.has_room(window, entry.size_bytes):
            return True
        resting = self._windows.gives_way(window, entry.size_bytes)
        if resting is None:
            return False
        self._copies.free_window(resting)
        return self._windows.has_room(window, entry.size_bytes)

    def _fill(self, plan: PlanState, entry: CacheEntry) -> bool:
        """Start a fill from the source; False when it must wait for a slot or for room."""
        if self._copies.busy or self._yield_to(plan, entry):
            return False
        asked = Requester.PLAN_IN_ITS_PART if self._reserve.taken_from(plan.window.user) else Requester.PLAN
        if not self._copies.carry_out(self._policy.place(entry, asked), entry, ahead_of=plan.window):
            return False
        self._windows.fetched(plan.window)
        return True

    def _promote(self, entry: CacheEntry) -> bool:
        """Start a fill from NVMe into RAM where that is free; False when it must wait for an eviction. Where part
        streams, the room of the window is for what is absent, and what lies on NVMe is read there."""
        copy = entry.best()
        if self._reserve.streams or copy is None or not copy.committed or copy.tier.name == RAM:
            return True
        if copy.tier.stalled:
            return True
        if self._copies.busy:
            return True
        placement = self._policy.promote(entry)
        self._copies.carry_out(placement, entry, source=copy)
        return not placement.room_coming

    def _yield_to(self, plan: PlanState, entry: CacheEntry) -> bool:
        """Whether a kept copy goes so that an absent extent may be kept in its place."""
        retention = plan.window.retention
        if retention is None or self._policy.room_to_keep(entry, free=False):
            return False
        kept = retention.instead_of(entry, _gives_place)
        if kept is not None:
            self._copies.evict(kept)
        return kept is not None


def _absent(entry: CacheEntry) -> bool:
    """Nothing is there and nothing is on its way; what failed waits for a reader to ask."""
    on_its_way = entry.waiters or entry.due_at is not None or entry.filling()
    return not (entry.ready or entry.failed or on_its_way)


def _gives_place(copy: Copy) -> bool:
    """A kept copy that nobody uses, needs or pins."""
    unused = copy.usable and copy.idle and not copy.entry.needs
    return copy.role is Role.KEPT and unused and not copy.entry.pinned
