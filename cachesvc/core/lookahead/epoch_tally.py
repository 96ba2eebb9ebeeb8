"""Which epoch of a dataset a plan belongs to.

Ranks of one job run through an epoch side by side, each with a plan of its own, and count as one. A plan begins another
epoch where its number was in the job's latest one, where all plans of that have ended, and for another job. A reader
that connects anew in mid-epoch has another number and the same rows: it goes on where its plan was broken off.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.core.events import Planned
from cachesvc.core.lookahead.plan_state import PlanState
from cachesvc.core.model import ExtentId
from cachesvc.core.records.dataset_state import DatasetState, EpochTally
from cachesvc.core.tiering.shares import Shares

FIRST_ROWS = 64
"""By which a plan is known again, with how many there are: in a shuffled epoch the first few tell it from all others."""
MAX_BROKEN = 1024
"""Plans of an epoch that are remembered as broken off; the earliest are forgotten first."""

Rows = Sequence[tuple[ExtentId, int, int]]


def join(event: Planned, home: DatasetState, shares: Shares, now: float) -> tuple[EpochTally, int]:
    """The epoch that a plan belongs to, and the step before which its extents have been counted there."""
    mark, epochs = _mark(event.rows), home.epochs
    tally = next((each for each in reversed(epochs) if each.launch == event.launch), None)
    goes_on = tally is not None and (tally.running or mark in tally.broken)
    if tally is None or not goes_on or event.plan in tally.plans:
        number = epochs[-1].number + 1 if epochs else 0
        tally = EpochTally(number, shares.bound_of(home), event.launch, now)
        epochs.append(tally)
    tally.plans.add(event.plan)
    tally.running.add(event.plan)
    return tally, tally.broken.pop(mark, 0)


def left(plan: PlanState) -> None:
    """A plan has ended, while it still has its rows: it may have been broken off."""
    tally = plan.tally
    if tally is None or (plan.exhausted and not plan.entered):
        return
    while len(tally.broken) >= MAX_BROKEN:
        del tally.broken[next(iter(tally.broken))]
    tally.broken[_mark(plan.rows)] = max(plan.passed, plan.counted_before)


def _mark(rows: Rows) -> int:
    return hash((len(rows), tuple(rows[:FIRST_ROWS])))
