"""Warns of ranks that take different numbers of batches: they would resume at different samples.

Process 0 publishes its position in the job's store. Every other process compares its own with it, and reports to the
store when it stays apart, where process 0 reads it. All of this runs on the thread of `RankFailureWatch`.
"""

from __future__ import annotations

import logging
import time
from typing import NamedTuple

from loader.job.store import JobStore

DRIFT_S = 30.0
"""An evaluation or a checkpoint on one rank may take some seconds; ranks with collectives are never so long apart."""
COMPARE_EVERY_S = 2.0
"""The interval at which processes compare; process 0 publishes more often, so that each comparison has a new count."""
ALLOWED_STEPS = 2
"""A rank may have its next batch, or the one after it, while others are in the step before."""
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
    steps apart, whichever is more; being further apart for `drift_s` seconds is logged."""

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
