"""The best hit rate that each of several claims can have, when all of them shuffle.

For a dataset of D bytes of which c can be cached, no demand-fill policy hits more than c / D. How many bytes can be cached
follows from the rules by which datasets share: pinned bytes stay; of the rest each dataset has its part by size, up to its
quota; room that quotas leave over is open to all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachesvc.core.records.dataset_state import DatasetState

HALVINGS = 60
"""Bisection steps in the search of the level: to the last bit of a float."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A dataset's bytes, how many of them a quota allows it to keep (all without one), and how many are pinned."""

    size_bytes: float
    quota_bytes: float
    pinned_bytes: float = 0.0


def claim_of(dataset: DatasetState, part: float, of_user_bytes: int) -> Claimed:
    """The claim of a dataset. `part`: the part of its size that counts where datasets share extents. `of_user_bytes`: what
    its user claims in all."""
    size, quota = dataset.size_bytes, float(dataset.size_bytes)
    if dataset.quota_bytes is not None:
        quota = min(quota, dataset.quota_bytes)
    if dataset.user_quota_bytes is not None:
        quota = min(quota, dataset.user_quota_bytes * size / max(1, of_user_bytes))
    pinned = dataset.kept_bytes if dataset.pinned else 0
    return Claimed(part * size, part * quota, part * pinned)


def bounds(capacity_bytes: float, claims: Sequence[Claimed]) -> list[float]:
    """The part of each claim's size that can be cached."""
    kept = _level(
        capacity_bytes,
        [(min(each.pinned_bytes, each.size_bytes), each.quota_bytes, each.size_bytes) for each in claims],
    )
    left = capacity_bytes - sum(kept)
    if left > 0:
        rest = [each.size_bytes - mine for each, mine in zip(claims, kept)]
        more = _level(left, [(0.0, each, each) for each in rest])
        kept = [mine + extra for mine, extra in zip(kept, more)]
    return [min(1.0, mine / each.size_bytes) if each.size_bytes else 1.0 for each, mine in zip(claims, kept)]


def _level(room_bytes: float, wants: Sequence[tuple[float, float, float]]) -> list[float]:
    """Share room by weight, each between its least and its most. `wants`: (least, most, weight) in bytes."""

    def shares(level: float) -> list[float]:
        return [max(least, min(most, level * weight)) for least, most, weight in wants]

    low, high = 0.0, 1.0
    if sum(shares(high)) <= room_bytes:
        return shares(high)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(shares(middle)) <= room_bytes:
            low = middle
        else:
            high = middle
    return shares(low)


def not_kept(open_bytes: float, absent_bytes: float, claimed_bytes: float, capacity_bytes: float) -> float:
    """Bytes W of those that are read side by side which the cache does not keep.

    Of O bytes read side by side, out of D claimed ones, a cache of C keeps its part of the data in all but W:
    W = O (1 - (C - W) / D). At least `absent_bytes`, what was absent when the epoch began: a cold epoch keeps its first
    extents, not a part of each of those to come. All of C where O does not fit.
    """
    open_bytes, absent_bytes = min(claimed_bytes, open_bytes), min(claimed_bytes, absent_bytes)
    if open_bytes >= capacity_bytes:
        return capacity_bytes
    streams_bytes = max(0.0, claimed_bytes - capacity_bytes)
    return max(absent_bytes, open_bytes * streams_bytes / max(1.0, claimed_bytes - open_bytes))
