"""Memory pressure: the RAM tier shrinks when the node's memory runs short, and grows when it is free again."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from cachesvc.core import events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import RAM
from cachesvc.core.records.residency import TierState
from cachesvc.daemon.disks.budgets import CALM_S, MEASURE_EVERY_S, RamBudget
from cachesvc.daemon.fills.fill_memory import FillMemory
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.system.memory import Memory, memories

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
