"""Finds ranks that take different numbers of batches: within an epoch, they would resume at different samples, and where
one of them left an iteration early, their epochs came apart."""

from __future__ import annotations

import logging
import sys
import time
from typing import NamedTuple

from cachesvc.core.errors import StateMismatch
from loader.job.store import JobStore

DRIFT_S = 30.0
"""An evaluation or a checkpoint on one rank may take some seconds; ranks with collectives are never so long apart."""
COMPARE_EVERY_S = 2.0
"""The interval at which processes compare; process 0 publishes more often, so that each comparison has a new count."""
ALLOWED_STEPS = 2
"""A rank may have its next batch, or the one after it, while others are in the step before."""
FIRST_READ = 2 * ALLOWED_STEPS
"""The step of an iteration after which ranks first read how another one ended it."""
_log = logging.getLogger("cachesvc")


class RankPosition(NamedTuple):
    """The position of a rank: its next step as a saved state counts it, and the `batches` of all epochs up to there."""

    rank: int
    epoch: int
    step: int
    batches: int

    def text(self) -> str:
        """The position in words, for messages."""
        return f"rank {self.rank} is at epoch {self.epoch}, step {self.step}"


class Drift:
    """Compares a rank's count of batches with another's. Where more than `allowed` are between them, they are apart.

    A rank hears of the other's count late. So that a delay is not taken for a lead, a rank counts as ahead only by what it
    had taken at the previous comparison, which the other's count is newer than.
    """

    def __init__(self, allowed: int) -> None:
        self._allowed = allowed
        self.forget()

    def forget(self) -> None:
        """Start comparing anew: one of the counts is unknown, or has restarted."""
        self._before: int | None = None
        self._side, self._since = 0, 0.0

    def compare(self, own: int, other: int, now: float) -> float | None:
        """Return for how many seconds this rank has certainly been ahead or behind; None while it is neither. `other` is
        the other rank's count at some time since the previous comparison."""
        ahead = self._before is not None and min(own, self._before) - other > self._allowed
        behind = other - own > self._allowed
        self._before, side = own, ahead - behind
        if side != self._side:
            self._side, self._since = side, now
        return now - self._since if side else None


class DriftWatch:
    """Watches one process, from one agreement of the ranks to the next. Ranks may be `prefetch` batches or ALLOWED_STEPS
    steps apart, whichever is more; being further apart for `drift_s` seconds is logged.

    Process 0 publishes its position in the job's store. Every other process compares its own with it, and reports to the
    store when it stays apart, where process 0 reads it. All of this runs on the thread of `RankFailureWatch`.
    """

    def __init__(
        self, store: JobStore, process: int, prefetch: int, accumulate: int, drift_s: float = DRIFT_S
    ) -> None:
        self._store, self._process, self._drift_s = store, process, drift_s
        self._drift = Drift(max(prefetch, ALLOWED_STEPS * accumulate))
        self._compare_every_s = min(COMPARE_EVERY_S, drift_s)
        self._compare_at = 0.0
        self._apart: tuple[RankPosition, RankPosition] | None = None
        """This process's position and another rank's, when they were last found apart."""
        self._apart_until, self._quiet_until = 0.0, 0.0
        self._last_report: object = None

    def update(self, own: RankPosition | None, now: float) -> None:
        """Publish, and compare where it is due. `own`: the position of this process; None where it can be compared with no
        other. Raises RuntimeError where the store is gone."""
        if self._process == 0:
            self._store.put("first", own)
        if now >= self._compare_at:
            self._compare_at = now + self._compare_every_s
            other = self._compare(own, now) if self._process else self._reported()
            if own is not None and other is not None:
                self._apart, self._apart_until = (own, other), now + 3 * self._compare_every_s

    def warn_of_state(self) -> None:
        """Warn, when a state is saved, of another rank at another position, as far as this process knows; at most every
        `drift_s`."""
        now = time.monotonic()
        if self._apart is None or not self._quiet_until <= now < self._apart_until:
            return
        self._quiet_until = now + self._drift_s
        own, other = self._apart
        _log.warning(
            "a state is saved while %s, and %s: all ranks that load it go on from the first place",
            own.text(),
            other.text(),
        )

    def _compare(self, own: RankPosition | None, now: float) -> RankPosition | None:
        """Return process 0's position, if this process has been apart from it; report that to process 0."""
        found = self._store.read("first")
        if own is None or found is None:
            self._drift.forget()
            return None
        first = RankPosition(*found)
        apart_s = self._drift.compare(own.batches, first.batches, now)
        if apart_s is None or apart_s < self._compare_every_s:  # a single comparison may be late
            return None
        self._store.put("apart", [own, now])
        if apart_s >= self._drift_s and self._store.count("warned", 1) == 1:
            _log.warning(
                "%s, and %s, for %.0f s: ranks that take different numbers of batches see some samples twice or not at"
                " all after a resume; take equally many on each (give a loader of one rank alone shard=False)",
                own.text(),
                first.text(),
                apart_s,
            )
        return first

    def _reported(self) -> RankPosition | None:
        """Return, on process 0, the position of a process that is apart; the process repeats it at each comparison."""
        before, self._last_report = self._last_report, (report := self._store.read("apart"))
        return RankPosition(*report[0]) if report and report != before else None


class IterationEnds:
    """Compares how the ranks of a job end one iteration. `store`: the part of one agreement. All methods raise
    StateMismatch.

    An `iter()` that gave a batch is an epoch. So a rank that alone looks at a batch by `next(iter(loader))` is an epoch
    ahead of the others from then on. Each rank counts its iterations since all ranks agreed, and writes to the job's store
    how each one ended: complete, or left at a place. No rank waits for another:

    - A rank writes before it reads. Of two ranks that ended an iteration differently at least one sees it and raises.
    - Within an iteration a rank reads after 4, 8, 16 ... steps. One that went on where another left notes so, and all raise
      when they read next. Ranks with a collective in each step do so in the same step, and none is left blocked.
    """

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
