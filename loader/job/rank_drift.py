"""Warns of ranks that take different numbers of batches: they would resume at different samples.

Process 0 publishes its position in the job's store. Every other process compares its own with it, and reports to the
store when it stays apart, where process 0 reads it. All of this runs on the thread of `RankFailureWatch`.
"""

from __future__ import annotations

import json
import logging
import time
from typing import NamedTuple

from cachesvc.core.drift import Drift
from loader.job.agreement import Store
from loader.job.topology import Topology

DRIFT_S = 30.0
"""An evaluation or a checkpoint on one rank may take some seconds; ranks with collectives are never so long apart."""
COMPARE_EVERY_S = 2.0
"""The interval at which processes compare; process 0 publishes twice as often, so that each comparison has a new count."""
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


class DriftWatch:
    """Watches one process, from one agreement of the ranks to the next. Ranks may be `prefetch` batches or ALLOWED_STEPS
    steps apart, whichever is more; being further apart for `drift_s` seconds is logged."""

    def __init__(
        self, topology: Topology, name: str, prefetch: int, accumulate: int, drift_s: float = DRIFT_S
    ) -> None:
        self._topology, self._drift_s = topology, drift_s
        self._key = f"cachesvc/drift/{name}"
        self._drift = Drift(max(prefetch, ALLOWED_STEPS * accumulate))
        self._compare_every_s = min(COMPARE_EVERY_S, drift_s)
        self._publish_at = self._compare_at = 0.0
        self._apart: tuple[RankPosition, RankPosition] | None = None
        """This process's position and another rank's, when they were last found apart."""
        self._apart_until, self._quiet_until = 0.0, 0.0
        self._published = self._last_report = ""

    def update(self, store: Store, own: RankPosition | None, now: float) -> None:
        """Publish or compare, where it is due. `own`: the position of this process; None where it can be compared with no
        other. Raises RuntimeError where the store is gone."""
        if self._topology.process == 0:
            self._publish(store, own, now)
        if now >= self._compare_at:
            self._compare_at = now + self._compare_every_s
            if self._topology.process == 0:
                self._read_report(store, own, now)
            else:
                self._compare(store, own, now)

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

    def _publish(self, store: Store, own: RankPosition | None, now: float) -> None:
        text = json.dumps(own)
        if now >= self._publish_at and text != self._published:
            store.set(f"{self._key}/first", text)
            self._publish_at, self._published = now + self._compare_every_s / 2, text

    def _compare(self, store: Store, own: RankPosition | None, now: float) -> None:
        first = _read(store, f"{self._key}/first")
        if own is None or first is None:
            return self._drift.forget()
        apart_s = self._drift.compare(own.batches, first.batches, now)
        if apart_s is None or apart_s < self._compare_every_s:  # a single comparison may be late
            return
        self._note_apart(own, first, now)
        store.set(f"{self._key}/apart", json.dumps([*own, now]))
        if apart_s >= self._drift_s and store.add(f"{self._key}/warned", 1) == 1:
            _log.warning(
                "%s, and %s, for %.0f s: ranks that take different numbers of batches see some samples twice or not at"
                " all after a resume; take equally many on each (give a loader of one rank alone shard=False)",
                own.text(),
                first.text(),
                apart_s,
            )

    def _read_report(self, store: Store, own: RankPosition | None, now: float) -> None:
        """Read, as process 0, the latest report of a process that is apart; the process repeats it at each comparison."""
        key = f"{self._key}/apart"
        report = store.get(key).decode() if store.check([key]) else ""
        if own is not None and report != self._last_report:
            self._note_apart(own, RankPosition(*json.loads(report)[:-1]), now)
        self._last_report = report

    def _note_apart(self, own: RankPosition, other: RankPosition, now: float) -> None:
        self._apart, self._apart_until = (own, other), now + 3 * self._compare_every_s


def _read(store: Store, key: str) -> RankPosition | None:
    found = json.loads(store.get(key)) if store.check([key]) else None
    return found and RankPosition(*found)
