"""Plans as readers submit them, checked before the core sees them: row by row, for one call about a million would keep
the interpreter, and so the loop, from all else."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from cachesvc.core import errors
from cachesvc.core.model import ExtentId
from cachesvc.daemon.grants import Known
from cachesvc.v1 import cachesvc_pb2 as pb

MAX_PLAN = 1_000_000
"""Entries: 64 TB of extents, and what a message of the largest size can hold."""


def entries_of(request: pb.SubmitPlanRequest, known: Known) -> tuple[tuple[ExtentId, int, int], ...]:
    """A plan's rows, checked; not on the loop's thread, since a plan may have a million of them."""
    if not len(request.extents) == len(request.first_steps) == len(request.last_steps) <= MAX_PLAN:
        raise errors.InvalidInput(f"a plan has three columns of one length, at most {MAX_PLAN:,}")
    if _beyond(request.extents, known):
        raise errors.InvalidInput(f"the plan names an extent beyond the {len(known.extent_ids)} there are")
    if any(later < earlier for earlier, later in pairwise(request.first_steps)):
        raise errors.InvalidInput("a plan is sorted by the step that needs an extent first")
    rows = zip(request.extents, request.first_steps, request.last_steps)
    return tuple((known.extent_ids[extent], first, last) for extent, first, last in rows)


def following_of(request: pb.SubmitPlanRequest, known: Known) -> tuple[ExtentId, ...]:
    """The order of the epoch after the plan's, checked as its rows are."""
    if len(request.following) > MAX_PLAN or _beyond(request.following, known):
        raise errors.InvalidInput(
            f"the epoch after the plan names an extent beyond the {len(known.extent_ids)}"
        )
    return tuple(known.extent_ids[extent] for extent in request.following)


def _beyond(extents: Iterable[int], known: Known) -> bool:
    count = len(known.extent_ids)
    return any(extent >= count for extent in extents)
