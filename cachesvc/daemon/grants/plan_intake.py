"""Reads the plans that readers hand over and checks them before the core sees them.

Short plans are read at once. Longer ones are read on a thread of their own, row by row: one call about a million rows
would keep the interpreter lock from the event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple, overload

from cachesvc.client import plan_memory
from cachesvc.client.plan_memory import PlanColumns
from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.core.model import ExtentId, ReaderId
from cachesvc.core.records.fair_queue import FairQueue
from cachesvc.daemon.access.quotas import UserCap
from cachesvc.daemon.loop.lanes import Lane

SHORT_ROWS = 512
"""A tenth of a millisecond: less than it takes to call another thread."""
ROWS_PER_USER = 8_000_000
"""1.1 GB of the daemon's memory: eight ranks over a million extents each (64 TB)."""


class LazyExtentIds(Sequence[ExtentId]):
    """Looks up extent ids by their indexes on access: a list of a million ids takes 20 to 40 ms to free."""

    __slots__ = ("_extent_ids", "_indexes")

    def __init__(self, extent_ids: tuple[ExtentId, ...], indexes: Sequence[int]) -> None:
        self._extent_ids = extent_ids
        self._indexes = indexes

    def __len__(self) -> int:
        return len(self._indexes)

    @overload
    def __getitem__(self, at: int) -> ExtentId: ...
    @overload
    def __getitem__(self, at: slice) -> list[ExtentId]: ...
    def __getitem__(self, at: int | slice) -> ExtentId | list[ExtentId]:
        if isinstance(at, slice):
            return [self._extent_ids[index] for index in self._indexes[at]]
        return self._extent_ids[self._indexes[at]]


class PlanEntries(NamedTuple):
    """A plan as the core takes it: (extent, first step, last step), the order of the epoch after it, and whether all
    epochs have these extents."""

    entries: tuple[tuple[ExtentId, int, int], ...]
    following: Sequence[ExtentId]
    local: bool = False


PlanCallback = Callable[["PlanEntries | CacheError"], None]


@dataclass(slots=True, eq=False)
class ReceivedPlan:
    """The memory of a plan as a reader handed it over. The descriptor is closed when the plan is read, or by
    `PlanIntake.forget`. `extent_ids` are those of the reader's dataset."""

    fd: int
    rows: int
    following_rows: int
    extent_ids: tuple[ExtentId, ...]
    local: bool = False

    @property
    def short(self) -> bool:
        return max(self.rows, self.following_rows) <= SHORT_ROWS


class PlanIntake:
    """Reads long plans one after the other, users in turn, and bounds the rows of each user's plans. A reader hands
    over its next plan when its last one is read, which bounds the queue. Runs on the loop's thread."""

    def __init__(self, lane: Lane, rows_per_user: int = ROWS_PER_USER) -> None:
        self._lane = lane
        self._cap = UserCap(rows_per_user)
        self._rows_of: dict[ReaderId, tuple[int, int]] = {}
        """The user and rows of each reader's current plan."""
        self._waiting: FairQueue[tuple[ReceivedPlan, PlanCallback]] = FairQueue()
        self._busy = False

    @property
    def under_way(self) -> bool:
        """True while a plan is being read or waits for that."""
        return self._busy

    def admit(self, reader: ReaderId, uid: int, plan: ReceivedPlan) -> bool:
        """Count the rows of a reader's plan in place of its last plan, which ends in any case. False: the user has too
        many rows, and the plan must not be taken."""
        self.ended(reader)
        rows = plan.rows + plan.following_rows
        if not self._cap.take(uid, rows):
            return False
        self._rows_of[reader] = uid, rows
        return True

    def ended(self, reader: ReaderId) -> None:
        """Stop counting the rows of a reader's plan, if it has one."""
        if reader in self._rows_of:
            self._cap.give_back(*self._rows_of.pop(reader))

    def read(self, plan: ReceivedPlan, uid: int, then: PlanCallback) -> None:
        """Read a plan and call `then` with its entries, or with the InvalidInput that it is."""
        if plan.short:
            then(_read(plan))
            return
        self._waiting.append(uid, (plan, then))
        if not self._busy:
            self._next()

    def forget(self, plan: ReceivedPlan) -> None:
        """Close a plan's memory unread. The lane does it, since a large memory takes long to free."""
        if plan.fd >= 0:
            self._lane.submit(partial(os.close, plan.fd), lambda _: None, lambda _: None)
            plan.fd = -1

    def close(self) -> None:
        """Read no more."""
        self._lane.close(0.0)

    def _next(self) -> None:
        while self._waiting:
            _, (plan, then) = self._waiting.first
            if plan.fd < 0:
                self._waiting.drop()
                continue
            self._waiting.served()
            self._busy = True
            own, plan.fd = replace(plan), -1
            self._lane.submit(partial(_read, own), partial(self._done, then), partial(self._done, then))
            return
        self._busy = False

    def _done(self, then: PlanCallback, result: PlanEntries | CacheError) -> None:
        self._next()
        then(result)


def _read(plan: ReceivedPlan) -> PlanEntries | CacheError:
    """Read and close the memory."""
    fd, plan.fd = plan.fd, -1
    try:
        columns = plan_memory.read(fd, plan.rows, plan.following_rows)
        return entries_of(columns, plan.extent_ids)._replace(local=plan.local)
    except InvalidInput as error:
        return error
    finally:
        os.close(fd)


def entries_of(columns: PlanColumns, extent_ids: tuple[ExtentId, ...]) -> PlanEntries:
    """Check a plan's rows and name their extents. Raises InvalidInput."""
    count = len(extent_ids)
    if _beyond(columns.extents, count) or _beyond(columns.following, count):
        raise InvalidInput(f"the plan names an extent beyond the {count} there are")
    if any(later < earlier for earlier, later in pairwise(columns.first_steps)):
        raise InvalidInput("a plan is sorted by the step that needs an extent first")
    rows = zip(columns.extents, columns.first_steps, columns.last_steps, strict=True)
    return PlanEntries(
        # A list first: a tuple that grows stays in the young generation, and each young collection would walk all of it.
        tuple([(extent_ids[extent], first, last) for extent, first, last in rows]),
        LazyExtentIds(extent_ids, columns.following) if columns.following else (),
    )


def _beyond(extents: Iterable[int], count: int) -> bool:
    return any(extent >= count for extent in extents)
