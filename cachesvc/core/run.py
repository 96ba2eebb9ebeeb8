"""The order of what is composed of datasets: any run of samples, dealt as `order.py` deals one dataset's.

A mixture and packs differ from a plain dataset only in what stands at a position of the run, so all that
`order.py` states of batches (exactly once, elastic, equal steps) holds for them too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from cachesvc.core.deal import I64, Deal
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order import OrderSpec, Plan, Tail, Touches


class Run(Protocol):
    """One epoch as a sequence of `size` samples."""

    @property
    def size(self) -> int: ...

    def at(self, positions: I64) -> I64:
        """What stands at ascending positions: numbers that mean something to the dataset alone."""

    def touches(self) -> Sequence[Touches]:
        """Where in the run the extents of each underlying dataset are read."""


class RunOrder:
    """The order of one epoch of a run; to be used as an `EpochOrder`. Raises `InvalidInput` when `last` is
    `error` and samples are left over."""

    def __init__(self, spec: OrderSpec, run: Run, epoch: int) -> None:
        self.spec, self.epoch, self.samples = spec, epoch, run.size
        self._run = run
        self._deal = Deal(run.size, spec.global_batch, spec.canonical_nodes if spec.shuffle else 1, spec.last)
        self.full_steps, self.tail_samples = self._deal.full_steps, self._deal.tail_size
        if spec.last == "error" and self.tail_samples:
            raise InvalidInput(
                f"{run.size} samples leave {self.tail_samples} over in global batches of {spec.global_batch}: choose"
                " last='drop' or 'pad', or another batch size"
            )

    @property
    def steps(self) -> int:
        """Global batches in the epoch, a partial one at the end included unless it is dropped."""
        return self._deal.steps

    @property
    def has_tail(self) -> bool:
        """Whether step `full_steps` exists and is answered by `tail`."""
        return self._deal.has_tail

    def slots(self, first_step: int, last_step: int, low: int, high: int) -> I64:
        """See `EpochOrder.slots`."""
        dealt = self._deal.full(first_step, last_step, low, high)
        found = [self._run.at(positions.reshape(-1)).reshape(positions.shape) for positions in dealt]
        return np.concatenate([np.empty((last_step - first_step, 0), np.int64), *found], axis=1)

    def tail(self, low: int, high: int) -> Tail:
        """See `EpochOrder.tail`."""
        real, repeats = self._deal.tail(low, high)
        ascending, back = np.unique(repeats, return_inverse=True)
        return Tail(np.concatenate((self._run.at(real), self._run.at(ascending)[back])), real.size)

    def plans(self, low: int, high: int) -> list[Plan]:
        """For each underlying dataset the extents that a rank with the slots [low, high) touches, and in which
        steps of this order."""
        found = []
        for touches in self._run.touches():
            steps = self._deal.touched(touches.begin, touches.end, low, high)
            order = np.argsort(steps.first_step, kind="stable")
            extent = touches.extent[steps.row[order]]
            found.append(Plan(extent, steps.first_step[order], steps.last_step[order]))
        return found
