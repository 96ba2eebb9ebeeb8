"""Finds the epoch of a dataset that a plan belongs to.

Ranks of one job run through an epoch side by side, each with a plan of its own, and count as one. A plan begins another
epoch where its number was in the job's latest epoch, where all plans of that epoch have ended, and for another job. A
reader that connects anew in mid-epoch has another number and the same rows: its plan goes on where it was broken off.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.core.events import Planned
from cachesvc.core.lookahead.plan_state import PlanState
from cachesvc.core.model import ExtentId
from cachesvc.core.records.dataset_state import DatasetState, EpochTally
from cachesvc.core.tiering.shares import Shares

FIRST_ROWS = 64
"""Rows that identify a plan, together with the number of rows: in a shuffled epoch they differ between all plans."""
MAX_BROKEN = 1024
"""Plans of an epoch that are remembered as broken off; the oldest are forgotten first."""

Rows = Sequence[tuple[ExtentId, int, int]]


def join(event: Planned, home: DatasetState, shares: Shares, now: float) -> tuple[EpochTally, int]:
    """The epoch that a plan joins, and the step before which its extents have been counted there already."""
    fingerprint, epochs = _fingerprint(event.rows), home.epochs
    tally = next((each for each in reversed(epochs) if each.launch == event.launch), None)
    continues = tally is not None and (tally.running or fingerprint in tally.broken)
    if tally is None or not continues or event.plan in tally.plans:
        number = epochs[-1].number + 1 if epochs else 0
        tally = EpochTally(number, shares.bound_of(home), event.launch, now)
        epochs.append(tally)
    tally.plans.add(event.plan)
    tally.running.add(event.plan)
    return tally, tally.broken.pop(fingerprint, 0)


def leave(plan: PlanState) -> None:
    """Note a plan that has ended before its last row. Call it while the plan still has its rows."""
    tally = plan.tally
    if tally is None or (plan.exhausted and not plan.entered):
        return
    while len(tally.broken) >= MAX_BROKEN:
        del tally.broken[next(iter(tally.broken))]
    tally.broken[_fingerprint(plan.rows)] = max(plan.passed, plan.counted_before)


def _fingerprint(rows: Rows) -> int:
    return hash((len(rows), tuple(rows[:FIRST_ROWS])))
