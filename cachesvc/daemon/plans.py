"""Plans as readers submit them, checked before the core sees them: in parts and row by row, for one call about a million
would keep the interpreter, and so the loop, from all else."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

from cachesvc.core import errors
from cachesvc.core.model import ExtentId
from cachesvc.daemon.grants import Known
from cachesvc.v1 import cachesvc_pb2 as pb

MAX_PLAN = 1_000_000
"""Entries: 64 TB of extents."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A reader's rows as they come, 24 bytes each."""

    extents: array[int] = field(default_factory=partial(array, "I"))
    first_steps: array[int] = field(default_factory=partial(array, "Q"))
    last_steps: array[int] = field(default_factory=partial(array, "Q"))
    following: array[int] = field(default_factory=partial(array, "I"))

    def take(self, part: pb.SubmitPlanRequest) -> None:
        """Add a part's rows. Raises InvalidInput where they are too many, or do not fit one another."""
        self.extents.extend(part.extents)
        self.first_steps.extend(part.first_steps)
        self.last_steps.extend(part.last_steps)
        self.following.extend(part.following)
        if not len(self.extents) == len(self.first_steps) == len(self.last_steps) <= MAX_PLAN:
            raise errors.InvalidInput(f"a plan has three columns of one length, at most {MAX_PLAN:,}")
        if len(self.following) > MAX_PLAN:
            raise errors.InvalidInput(f"the epoch after the plan has more than {MAX_PLAN:,} entries")


def entries_of(plan: Plan, known: Known) -> tuple[tuple[ExtentId, int, int], ...]:
    """A plan's rows, checked; not on the loop's thread, since a plan may have a million of them."""
    if _beyond(plan.extents, known):
        raise errors.InvalidInput(f"the plan names an extent beyond the {len(known.extent_ids)} there are")
    if any(later < earlier for earlier, later in pairwise(plan.first_steps)):
        raise errors.InvalidInput("a plan is sorted by the step that needs an extent first")
    rows = zip(plan.extents, plan.first_steps, plan.last_steps)
    return tuple((known.extent_ids[extent], first, last) for extent, first, last in rows)


def following_of(plan: Plan, known: Known) -> tuple[ExtentId, ...]:
    """The order of the epoch after the plan's, checked as its rows are."""
    if _beyond(plan.following, known):
        raise errors.InvalidInput(
            f"the epoch after the plan names an extent beyond the {len(known.extent_ids)}"
        )
    return tuple(known.extent_ids[extent] for extent in plan.following)


def _beyond(extents: Iterable[int], known: Known) -> bool:
    count = len(known.extent_ids)
    return any(extent >= count for extent in extents)
