"""Look-ahead: fills in the order in which plans need them, as far ahead as room, slots and pacing allow.

An absent extent is entered when its fill starts. Where everything fits, a plan fetches its absent extents as far ahead as
it finds room. Where the data does not fit, the plans of one order together may have only their part of the window fetched
and not yet read (`order_windows.py`). They fetch it along a schedule (`schedule.py`), so that the source sees an even rate
over the whole plan. A schedule delays no reader: while a reader waits for a fill, only room and slots limit its plans.

Over extents that are there or on their way, or fit no tier that works, a plan goes `window_bytes` ahead and no
further, so that one event never walks a whole plan. Extents that it is reading now count towards this limit only
where the window has reserved room. Otherwise, a plan that reads more than the limit side by side would fetch nothing
ahead. The extents of the next epoch follow its rows, within the same limit; where the data does not fit, none of them
is fetched from the source before the next plan. A plan that is not scheduled yet, or whose cursor has left a backlog
behind, starts no fill. Its readers' demands fetch the extents that they need.

A plan begins with the extents of its first step. While they come, it fetches no other large extent: all together would
share the source's bandwidth, and the first batch would wait for all.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque

from cachesvc.core.lookahead.order_windows import OrderWindow, OrderWindows
from cachesvc.core.lookahead.plans import Plans, PlanState
from cachesvc.core.model import RAM
from cachesvc.core.records.residency import CacheEntry, Copy, Role
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.fill_starts import FillStarts, Readiness
from cachesvc.core.tiering.policy import Requester
from cachesvc.core.tiering.room import NOWHERE

FEED_LIMIT = 64
"""Rows examined in one event: well under a millisecond, so that grants never wait for a long plan."""


LARGE_BYTES = 16 << 20
"""An extent of this size is read by several connections. Smaller ones are fetched side by side from the beginning."""


class Lookahead:
    """Chooses what plans fetch next."""

    def __init__(self, copies: Copies, plans: Plans, windows: OrderWindows, starts: FillStarts) -> None:
        self._copies = copies
        self._starts = starts
        self._policy = copies.policy
        self._reserve = copies.policy.reserve
        self._plans = plans
        self._windows = windows

    def feed(self) -> bool:
        """Enter rows, users round robin and each user's most urgent plan first, until each plan waits or is exhausted.

        Where a user's most urgent absent extent finds no slot or room, no later one of that user takes it; then only
        resident extents are entered. Returns False when `FEED_LIMIT` was reached and there is more to do now.
        """
        plans = self._plans.plans
        active = self._windows.active()
        users: defaultdict[int, list[tuple[int, int, int]]] = defaultdict(list)
        for each in plans.values():
            if each.paced and not each.behind and not each.exhausted and each.window in active:
                users[each.window.user].append(each.urgency)
        for urgent in users.values():
            heapq.heapify(urgent)
        queue = deque(sorted(users, key=self._windows.served_at))
        reader_waits = any(copy.entry.waiters for copy in self._copies.filling)
        waiting, moved = set[tuple[int, bool]](), False
        for _ in range(FEED_LIMIT):
            while queue and not users[queue[0]]:
                queue.popleft()
            if not queue:
                return True
            user = queue[0]
            queue.rotate(-1)
            plan = plans[heapq.heappop(users[user])[-1]]
            if plan.exhausted:  # what it had of the next epoch was taken back meanwhile
                continue
            extent, _, last_step = plan.row(plan.next)
            entry = self._copies.entry(extent)
            if entry is None or last_step < plan.passed:
                self._plans.skip(plan, extent)
            elif not _absent(entry) or not self._policy.fits(entry):
                if self._far(plan) or not self._promote(plan, entry):
                    continue
                self._plans.enter(plan, entry)
            else:
                kind = user, entry.made_from is not None  # which wait for different slots
                if entry.size_bytes >= LARGE_BYTES and self._plans.begins(plan):
                    continue
                if kind in waiting or not (
                    self._may_fetch(plan, entry, reader_waits) and self._fill(plan, entry)
                ):
                    if not plan.in_next_epoch:  # nothing is less urgent
                        waiting.add(kind)
                    continue
                self._plans.enter(plan, entry)
            moved = True
            if not plan.exhausted:
                heapq.heappush(users[user], plan.urgency)
        return not moved or not any(users.values())

    def _far(self, plan: PlanState) -> bool:
        """Return whether a plan is as far ahead as it may go over extents that are there. Extents that it is reading now
        count only where the window has reserved room."""
        ahead_bytes = plan.entered_bytes if self._reserve.has_window else plan.coming_bytes
        return ahead_bytes >= self._reserve.window_bytes

    def _may_fetch(self, plan: PlanState, entry: CacheEntry, reader_waits: bool) -> bool:
        """Return whether an absent extent may be fetched now."""
        if not self._reserve.streams:
            return not plan.in_next_epoch or not self._far(plan)
        if plan.in_next_epoch:  # the schedule of the next plan spreads these fills
            return False
        if self._reserve.oversubscribed_by(plan.window.user):
            return self._policy.room_to_keep(entry)
        schedule = None if reader_waits and plan.passed else plan.schedule
        if schedule is not None and not schedule.allows(plan.next, plan.passed):
            return False
        return self._has_room(plan.window, entry)

    def _has_room(self, window: OrderWindow, entry: CacheEntry) -> bool:
        if self._windows.has_room(window, entry.size_bytes):
            return True
        idle = self._windows.window_to_free(window, entry.size_bytes)
        if idle is None:
            return False
        self._copies.free_ahead(idle.ahead)
        return self._windows.has_room(window, entry.size_bytes)

    def _fill(self, plan: PlanState, entry: CacheEntry) -> bool:
        """Start a fill from the source or by a preparer; False when it must wait for a slot or for room."""
        if self._starts.readiness(entry) is not Readiness.NOW or self._evict_kept_for(plan, entry):
            return False
        requester = (
            Requester.PLAN_IN_ITS_PART if self._reserve.taken_from(plan.window.user) else Requester.PLAN
        )
        if self._starts.start(entry, requester, plan.window.ahead) is not None:
            return False
        self._windows.note_fetched(plan.window)
        return True

    def _promote(self, plan: PlanState, entry: CacheEntry) -> bool:
        """Start a fill from NVMe into RAM where RAM has room; False when the row waits for room. Where part of the data
        streams, the window is for absent extents, and those on NVMe are read there."""
        copy = entry.best()
        if self._reserve.streams or copy is None or not copy.committed or copy.tier.name == RAM:
            return True
        promotes = self._policy.promotes(copy)
        if copy.tier.stalled or (
            self._reserve.ahead_of_nvme and not promotes
        ):  # the window is for small samples
            return True
        if promotes and plan.row(plan.next)[1] <= plan.passed:
            return True  # it is due: its reader has opened the file, and reads the window's samples there
        if self._copies.busy:
            return not promotes
        placement = self._policy.promote(entry)
        if placement is NOWHERE and not plan.in_next_epoch and self._plans.withdraw_next_epoch():
            placement = self._policy.promote(entry)
        if self._copies.carry_out(placement, entry, source=copy):
            return True
        return not placement.room_coming and not (promotes and self._policy.window_has_room)

    def _evict_kept_for(self, plan: PlanState, entry: CacheEntry) -> bool:
        """Evict a kept copy so that an absent extent may be kept in its place; whether one was evicted."""
        retention = plan.window.retention
        if retention is None or not self._policy.keeps(entry):
            return False
        if self._policy.room_to_keep(entry, free=False):
            return False
        kept = retention.choose_victim(entry, _replaceable)
        if kept is not None:
            self._copies.evict(kept)
        return kept is not None


def _absent(entry: CacheEntry) -> bool:
    """Return whether an extent is neither resident nor being fetched. One whose fill failed waits for a reader's demand."""
    return not (entry.ready or entry.failed or entry.in_progress)


def _replaceable(copy: Copy) -> bool:
    """Return whether a copy is kept, idle, not needed and not pinned."""
    unused = copy.usable and copy.idle and not copy.entry.needs
    return copy.role is Role.KEPT and unused and not copy.entry.pinned
