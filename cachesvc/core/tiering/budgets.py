"""The tiers that work, and what they can hold together."""

from __future__ import annotations

from collections.abc import Mapping

from cachesvc.core.model import RAM, TierName
from cachesvc.core.records.residency import TierState


def working(tiers: Mapping[TierName, TierState]) -> list[TierState]:
    """The tiers that are not lost."""
    return [tier for tier in tiers.values() if not tier.lost]


def answering(tiers: Mapping[TierName, TierState]) -> list[TierState]:
    """The tiers that work and do not stall."""
    return [tier for tier in working(tiers) if not tier.stalled]


def by_preference(tiers: Mapping[TierName, TierState]) -> list[TierState]:
    """The tiers that work, in the order of placement: RAM, then NVMe, the emptiest first."""
    works = working(tiers)
    return sorted(works, key=lambda tier: (tier.name != RAM, tier.used_bytes / max(1, tier.budget_bytes)))


def capacity_bytes(tiers: Mapping[TierName, TierState]) -> int:
    """Bytes of all tiers that work, less what readers hold from before a restart."""
    return sum(max(0, tier.budget_bytes - tier.held_bytes) for tier in working(tiers))
