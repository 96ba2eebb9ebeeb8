"""Orders of samples composed of datasets: any run of samples, assigned as `epoch_order.py` assigns one dataset's.

A mixture and packs differ from a plain dataset only in which sample is at a position of the run. So all that
`epoch_order.py` states of batches (exactly once, elastic, equal steps) holds for them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np

from cachesvc.core.order.assignment import I64, Assignment
from cachesvc.core.order.epoch_order import (
    NEVER_ROTATED,
    EpochOrder,
    OrderSpec,
    Plan,
    Tail,
    Touches,
    plan_of,
    tail_of,
)
from cachesvc.core.order.part_layout import PartLayout
from cachesvc.core.order.skipped import NONE_SKIPPED, Skipped


class Run(Protocol):
    """One epoch as a sequence of `size` samples."""

    @property
    def size(self) -> int: ...

    def at(self, positions: I64) -> I64:
        """The samples at ascending positions, as numbers that only the dataset interprets."""

    def touches(self) -> Sequence[Touches]:
        """The run positions of the extents of each underlying dataset."""


def component_spec(spec: OrderSpec) -> OrderSpec:
    """Return the spec of a component's own run, which is not divided among ranks: no border cuts it. What a run leaves out
    keeps its place."""
    return replace(
        spec,
        global_batch=1,
        canonical_nodes=1,
        last="drop",
        rotated_from=NEVER_ROTATED,
        skipped="",
        excluded="",
        since_epoch=0,
        since_step=0,
    )


class DatasetRun:
    """One epoch of a plain dataset as a component. Its samples are indices."""

    def __init__(self, spec: OrderSpec, layout: PartLayout, epoch: int) -> None:
        self._order, self._layout = EpochOrder(component_spec(spec), layout.extent_first, epoch), layout

    @property
    def size(self) -> int:
        """The samples of the epoch."""
        return self._order.samples

    def at(self, positions: I64) -> I64:
        """See `Run`."""
        found, index_of = self._order.at(positions), self._layout.index_of
        return found if index_of is None else index_of[found]

    def touches(self) -> list[Touches]:
        """See `Run`."""
        if self._layout.extents_known:
            return [self._order.touches()]
        return [Touches(*(np.empty(0, np.int64) for _ in range(3)))]


class RunOrder:
    """The order of one epoch of a run, with the interface of `EpochOrder`. Raises `InvalidInput` when `last` is `error` and
    samples are left over. `skipped`: as of `EpochOrder`. `in_time_order`: batches are consecutive positions, for any number
    of canonical nodes."""

    def __init__(
        self,
        spec: OrderSpec,
        run: Run,
        epoch: int,
        skipped: Skipped = NONE_SKIPPED,
        in_time_order: bool = False,
    ) -> None:
        self.spec, self.epoch, self.samples = spec, epoch, run.size
        self._run, nodes = run, 1 if in_time_order else spec.node_parts
        self._assignment = assignment = Assignment(run.size, spec.global_batch, nodes, spec.last, skipped)
        self.skipped, self.data_steps = skipped, assignment.data_steps
        self.steps, self.full_steps = assignment.steps, assignment.full_steps
        self.has_tail, self.tail_samples = assignment.has_tail, assignment.tail_size

    def slots(self, first_step: int, last_step: int, low: int, high: int) -> I64:
        """See `EpochOrder.slots`."""
        return self._assignment.slots(self._run.at, first_step, last_step, low, high)

    def tail(self, low: int, high: int, batches: int = 1) -> Tail:
        """See `EpochOrder.tail`."""
        return tail_of(self._assignment, self._run.at, low, high, batches)

    def plans(self, low: int, high: int, batches: int = 1) -> list[Plan]:
        """One plan for each underlying dataset: the extents that a rank with the slots [low, high) in `batches`
        micro-batches touches, and in which steps of this order."""
        return [plan_of(self._assignment, touches, low, high, batches) for touches in self._run.touches()]
