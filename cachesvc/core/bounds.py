"""The best hit rate that each of several claims can have, when all of them shuffle.

Of a dataset of D bytes of which c can lie in the cache, no demand-fill policy hits more than c / D. What can lie
there follows from the rules by which datasets share: what is pinned stays; of the rest each has its part by size,
up to its quota; and room that quotas leave is anybody's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

HALVINGS = 60
"""Of the interval in which the level is sought: to the last bit of a float."""


@dataclass(frozen=True, slots=True)
class Claimed:
    """A dataset: its bytes, how many a quota lets it keep (its size without one), and how many are pinned."""

    size_bytes: float
    quota_bytes: float
    pinned_bytes: float = 0.0


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
