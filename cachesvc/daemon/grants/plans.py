"""Plans that readers hand over, read and checked before the core sees them: short ones at once, longer ones on a thread
of their own, row by row, for one call about a million would keep the interpreter, and so the loop, from all else."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, overload

from cachesvc.client import plan_memory as plans
from cachesvc.client.plan_memory import Columns
from cachesvc.core.errors import CacheError, InvalidInput
from cachesvc.core.model import ExtentId
from cachesvc.core.records.fair_queue import FairQueue
from cachesvc.daemon.grants.plan_quota import ROWS, Rows
from cachesvc.daemon.loop.lanes import Lane

SHORT_ROWS = 512
"""A tenth of a millisecond: less than it takes to ask another thread."""


class Named(Sequence[ExtentId]):
    """Extents by their indexes, named when asked for: a million in any order take 20 to 40 ms to let go of."""

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


class Entries(NamedTuple):
    """A plan as the core takes it: (extent, first step, last step), and the order of the epoch after it."""

    entries: tuple[tuple[ExtentId, int, int], ...]
    following: Sequence[ExtentId]


Then = Callable[["Entries | CacheError"], None]


@dataclass(slots=True, eq=False)
class Handed:
    """A plan's memory as a reader of a dataset with these extents handed it over; the descriptor is closed by whoever
    reads it, or by `Plans.forget`."""

    fd: int
    rows: int
    more: int
    extent_ids: tuple[ExtentId, ...]

    @property
    def short(self) -> bool:
        return max(self.rows, self.more) <= SHORT_ROWS


class Plans:
    """Reads one long plan after the other, users in turn. No reader hands over another one before its last is read,
    which is the bound of the queue. Runs on the loop's thread."""

    def __init__(self, lane: Lane, most_rows: int = ROWS) -> None:
        self._lane = lane
        self.rows = Rows(os.geteuid(), most_rows)
        """Of those that were read as well, for as long as their readers have them."""
        self._waiting: FairQueue[tuple[Handed, Then]] = FairQueue()
        self._busy = False

    @property
    def under_way(self) -> bool:
        """Whether any is read, or waits for that."""
        return self._busy

    def take(self, handed: Handed, user: int, then: Then) -> None:
        """Read a plan, and call `then` with what is in it, or with the InvalidInput that it is."""
        if handed.short:
            then(_read(handed))
            return
        self._waiting.append(user, (handed, then))
        if not self._busy:
            self._next()

    def forget(self, handed: Handed) -> None:
        """Nobody needs it any more. It may have grown since it came, to what takes long to free."""
        if handed.fd >= 0:
            self._lane.submit(partial(os.close, handed.fd), lambda _: None, lambda _: None)
            handed.fd = -1

    def close(self) -> None:
        """Read no more."""
        self._lane.close(0.0)

    def _next(self) -> None:
        while self._waiting:
            _, (handed, then) = self._waiting.first
            if handed.fd < 0:
                self._waiting.drop()
                continue
            self._waiting.served()
            self._busy = True
            own, handed.fd = Handed(handed.fd, handed.rows, handed.more, handed.extent_ids), -1
            self._lane.submit(partial(_read, own), partial(self._done, then), partial(self._done, then))
            return
        self._busy = False

    def _done(self, then: Then, found: Entries | CacheError) -> None:
        self._next()
        then(found)


def _read(handed: Handed) -> Entries | CacheError:
    """Closes the memory."""
    fd, handed.fd = handed.fd, -1
    try:
        return entries_of(plans.read(fd, handed.rows, handed.more), handed.extent_ids)
    except InvalidInput as error:
        return error
    finally:
        os.close(fd)


def entries_of(columns: Columns, extent_ids: tuple[ExtentId, ...]) -> Entries:
    """A plan's rows, checked. Raises InvalidInput."""
    count = len(extent_ids)
    if _beyond(columns.extents, count) or _beyond(columns.following, count):
        raise InvalidInput(f"the plan names an extent beyond the {count} there are")
    if any(later < earlier for earlier, later in pairwise(columns.first_steps)):
        raise InvalidInput("a plan is sorted by the step that needs an extent first")
    rows = zip(columns.extents, columns.first_steps, columns.last_steps, strict=True)
    return Entries(
        # a list first: a tuple that grows stays young, and each young collection of garbage would walk all of it
        tuple([(extent_ids[extent], first, last) for extent, first, last in rows]),
        Named(extent_ids, columns.following) if columns.following else (),
    )


def _beyond(extents: Iterable[int], count: int) -> bool:
    return any(extent >= count for extent in extents)
