"""Budgets of the tiers: what the settings give, less the room that files and processes of others take. The RAM
tier shrinks when the node's memory runs short, and grows when it is free again."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from cachesvc.config import NvmeSpec, size_text
from cachesvc.core import events
from cachesvc.core.errors import CacheError, OutOfSpace
from cachesvc.core.model import RAM, TierName
from cachesvc.core.records.residency import TierState
from cachesvc.daemon.fills.fill_memory import FillMemory
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.system.memory import Memory, memories
from cachesvc.tiers.probe import Room

SHARE_SPARE = 0.05
"""The part of a disk left free where the budget is a share: a full disk fails all its users."""
SIZE_SPARE = 0.01
"""The part left free where the budget is in bytes: the operator has done the sum, but others may write too."""
STEADY = 3
"""Measurements in a row that must be low before a budget shrinks. File systems free removed files late; a budget that
shrank for that would evict more."""


def budget_bytes(spec: NvmeSpec, room: Room, ours_bytes: int) -> int:
    """The budget of a directory in bytes: as given, but at most the free room less the spare, plus `ours_bytes`, which
    the cache itself holds there."""
    spare = int(room.total_bytes * (SIZE_SPARE if spec.size_bytes else SHARE_SPARE))
    wanted = spec.size_bytes or int(room.total_bytes * spec.share)
    return max(0, min(wanted, room.free_bytes + ours_bytes - spare))


def checked_budget(spec: NvmeSpec, room: Room, ours_bytes: int, extent_bytes: int) -> int:
    """The budget in bytes at the start. Raises OutOfSpace where it holds no extent and the directory has none."""
    budget = budget_bytes(spec, room, ours_bytes)
    if budget < extent_bytes and not ours_bytes:
        raise OutOfSpace(
            f"{spec.path} has room for {budget:,} bytes, less than one extent of {size_text(extent_bytes)}; free room"
            " there, or give --nvme another directory"
        )
    return budget


class Budgets:
    """The budgets of cache directories, which change as disks fill and empty."""

    def __init__(self, specs: Mapping[TierName, NvmeSpec]) -> None:
        self._specs = specs
        self._last: dict[TierName, deque[int]] = {name: deque(maxlen=STEADY) for name in specs}

    def replace(self, specs: Mapping[TierName, NvmeSpec]) -> None:
        """Take other budgets of the same directories, which the next measurement of each sets."""
        self._specs = specs
        for last in self._last.values():
            last.clear()

    def renewed(self, tier: TierName) -> None:
        """Drop the measurements of a tier, which has another directory now."""
        self._last[tier].clear()

    def measured(self, tier: TierName, room: Room, ours_bytes: int) -> int:
        """Add a measurement of the disk's room; return the budget in bytes. The cache holds `ours_bytes` there."""
        last = self._last[tier]
        last.append(budget_bytes(self._specs[tier], room, ours_bytes))
        return max(last)


LEAST_EXTENTS = 4
"""Extents that the RAM tier keeps while memory is short, at most half of the memory to be left free. With room for none,
reads that have no other tier would stop until a trainer has written its checkpoint, and a minute longer."""
MEASURE_EVERY_S = 1.0
CALM_S = 60.0
"""The RAM tier grows when memory has been free for so long, since a trainer's use goes up and down."""


class RamBudget:
    """The RAM tier's budget, which follows the node's free memory."""

    def __init__(self, given_bytes: int, least_bytes: int) -> None:
        """`given_bytes` is its maximum, `least_bytes` its minimum, see `LEAST_EXTENTS`."""
        self._asked_least_bytes = least_bytes
        self.replace(given_bytes)

    def replace(self, given_bytes: int) -> None:
        """Take another maximum, which the next measurement sets."""
        self._given_bytes, self._least_bytes = given_bytes, min(given_bytes, self._asked_least_bytes)
        self._low: deque[tuple[float, int]] = deque()

    def measured(self, memories: Sequence[Memory], ours_bytes: int, work_bytes: int, now: float) -> int:
        """Add a measurement; return the budget in bytes, the least of the last `CALM_S` seconds.

        The tier takes `ours_bytes` now; fills are about to take `work_bytes` more.
        """
        rooms = (one.free_bytes + ours_bytes - work_bytes - one.spare_bytes for one in memories)
        least = min(self._least_bytes, *(one.spare_bytes // 2 for one in memories))
        found = max(least, min(self._given_bytes, *rooms))
        low = self._low  # a monotonic queue: each later budget is larger
        while low and low[-1][1] >= found:
            low.pop()
        low.append((now, found))
        while low[0][0] < now - CALM_S:
            low.popleft()
        return low[0][1]


log = logging.getLogger(__name__)


class MemoryPressure:
    """Measures the memory every second, on a thread of its own, since a busy kernel answers late.

    The methods run on the loop's thread.
    """

    def __init__(
        self,
        ram: TierState | None,
        least_bytes: int,
        fill_memory: FillMemory,
        lane: Lane,
        clock: Callable[[], float],
        handle: Callable[[events.Event], None],
    ) -> None:
        """`least_bytes` is the least budget of the RAM tier. Without one nothing is measured."""
        self._ram, self._lane, self._clock, self._handle = ram, lane, clock, handle
        self._fill_memory = fill_memory
        self._budget = RamBudget(ram.given_bytes if ram else 0, least_bytes)
        self._due_at = clock() if ram else math.inf

    def next_deadline(self) -> float:
        """The time of the next measurement; inf while one is under way."""
        return self._due_at

    def tick(self) -> None:
        """Start a measurement."""
        self._due_at = math.inf
        self._lane.submit(memories, self._measured, self._failed)

    def replace(self, given_bytes: int) -> None:
        """Take another maximum of the RAM tier; the next measurement sets it."""
        self._budget.replace(given_bytes)

    def close(self) -> None:
        """Stop measuring."""
        self._lane.close(0.0)

    def _measured(self, found: list[Memory]) -> None:
        assert self._ram is not None, "a measurement without a RAM tier"
        now, before = self._clock(), self._ram.given_bytes
        self._due_at = now + MEASURE_EVERY_S
        ours_bytes, work_bytes = self._ram.used_bytes + self._ram.held_bytes, self._fill_memory.to_come_bytes
        budget_bytes = self._budget.measured(found, ours_bytes, work_bytes, now)
        if budget_bytes != before:
            self._resize(before, budget_bytes)
        self._fill_memory.memory_measured()

    def _resize(self, before: int, budget_bytes: int) -> None:
        if budget_bytes < before:
            log.warning(
                "the RAM tier shrinks: memory is short, or its budget is smaller",
                extra={"from": before, "to": budget_bytes},
            )
        else:
            log.info("the RAM tier grows", extra={"from": before, "to": budget_bytes})
        self._handle(events.Resized(RAM, budget_bytes))

    def _failed(self, error: CacheError) -> None:
        log.warning("free memory cannot be measured", extra={"error": str(error)})
        self._due_at = self._clock() + CALM_S
