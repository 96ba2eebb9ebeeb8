"""The best hit rate that each of several claims can have, when all of them shuffle.

Of a dataset of D bytes of which c can lie in the cache, no demand-fill policy hits more than c / D. What can lie
there follows from the rules by which datasets share: what is pinned stays; of the rest each has its part by size,
up to its quota; and room that quotas leave is anybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachesvc.core.records.dataset_state import DatasetState

HALVINGS = 60
"""Of the interval in which the level is sought: to the last bit of a float."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A dataset: its bytes, how many a quota lets it keep (its size without one), and how many are pinned."""

    size_bytes: float
    quota_bytes: float
    pinned_bytes: float = 0.0


def claim_of(dataset: DatasetState, part: float, of_user_bytes: int) -> Claimed:
    """A dataset, of whose extents `part` is its own, of a user who claims so many bytes."""
    size, quota = dataset.size_bytes, float(dataset.size_bytes)
    if dataset.quota_bytes is not None:
        quota = min(quota, dataset.quota_bytes)
    if dataset.user_quota_bytes is not None:
        quota = min(quota, dataset.user_quota_bytes * size / max(1, of_user_bytes))
    pinned = dataset.kept_bytes if dataset.pinned else 0
    return Claimed(part * size, part * quota, part * pinned)


def bounds(capacity_bytes: float, claims: Sequence[Claimed]) -> list[float]:
    """For each claim, what can lie in the cache as a part of its size."""
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
    """Share room by weight, each between its least and its most: (least, most, weight)."""

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
    """Of O bytes that are read side by side, out of D claimed ones, those that a cache of C does not keep, W, where it
    keeps a part of the data in all but W: W = O (1 - (C - W) / D). What is absent at an epoch's beginning where that is
    more: in a cold one the first extents are kept, not a part of each of those to come. All of C where they do not fit."""
    open_bytes, absent_bytes = min(claimed_bytes, open_bytes), min(claimed_bytes, absent_bytes)
    if open_bytes >= capacity_bytes:
        return capacity_bytes
    streams_bytes = max(0.0, claimed_bytes - capacity_bytes)
    return max(absent_bytes, open_bytes * streams_bytes / max(1.0, claimed_bytes - open_bytes))
