"""Finds ranks whose epochs came apart: one of them left an iteration early, and another one went on in it.

An `iter()` that gave a batch is an epoch. So a rank that alone looks at a batch by `next(iter(loader))` is an epoch
ahead of the others from then on. Each rank counts its iterations since all ranks agreed, and writes to the job's store
how each one ended: complete, or left at a place. No rank waits for another:

- A rank writes before it reads. Of two ranks that ended an iteration differently at least one sees it and raises.
- Within an iteration a rank reads after 4, 8, 16 ... steps. One that went on where another left notes so, and all raise
  when they read next. Ranks with a collective in each step do so in the same step, and none is left blocked.
"""

from __future__ import annotations

import sys

from cachesvc.core.errors import StateMismatch
from loader.job.rank_drift import ALLOWED_STEPS, RankPosition
from loader.job.store import JobStore

FIRST_READ = 2 * ALLOWED_STEPS
"""The step of an iteration after which ranks first read how another one ended it."""


class IterationEnds:
    """Compares how the ranks of a job end one iteration. `store`: the part of one agreement. All methods raise
    StateMismatch."""

    def __init__(self, store: JobStore, iteration: int, accumulate: int) -> None:
        self._store, self._accumulate = store, accumulate
        self._left, self._complete = f"{iteration}/left", f"{iteration}/complete"

    def is_due(self, taken: int) -> bool:
        """Return whether ranks read how others ended the iteration after this many of its batches."""
        step, micro = divmod(taken, self._accumulate)
        return not micro and step >= FIRST_READ and not step & (step - 1)

    def go_on(self, own: RankPosition, taken: int) -> None:
        """Read whether another rank left this iteration, in which this rank goes on. A thread that reads ahead may have
        taken a batch or two more on one rank than on another when their loops left."""
        self._check(taken)
        left = self._store.read(self._left)
        if left and self._are_apart(left := RankPosition(*left), own):
            self._store.put("apart", [taken, _text(left, own)])

    def complete(self, own: RankPosition) -> None:
        """Note that this rank took all batches."""
        self._store.put(self._complete, own)
        self._check(sys.maxsize)
        if left := self._store.read(self._left):
            raise StateMismatch(_text(RankPosition(*left), own))

    def leave(self, own: RankPosition) -> None:
        """Note that this rank left early, and began another iteration."""
        first = RankPosition(*self._store.put_first(self._left, own))
        if self._are_apart(first, own):
            raise StateMismatch(_text(*sorted((first, own), key=lambda at: at.batches)))
        if complete := self._store.read(self._complete):
            raise StateMismatch(_text(own, RankPosition(*complete)))

    def _check(self, taken: int) -> None:
        """Raise what a rank noted when it had taken fewer batches: not all ranks know of a note made just now."""
        noted, text = self._store.read("apart") or (taken, "")
        if noted < taken:
            raise StateMismatch(text)

    def _are_apart(self, one: RankPosition, other: RankPosition) -> bool:
        return abs(one.batches - other.batches) > ALLOWED_STEPS * self._accumulate


def _text(left: RankPosition, other: RankPosition) -> str:
    return (
        f"rank {left.rank} left epoch {left.epoch} at step {left.step} and began the next one, but rank {other.rank} went"
        f" on to step {other.step}: each iter() of which a batch was taken is an epoch. To look at a batch on one rank,"
        " call peek(); where ranks leave loops at different steps, call set_epoch(n) on all of them before each epoch; a"
        " loader of one rank alone wants shard=False"
    )
