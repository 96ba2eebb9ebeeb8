"""Takes over what a tier holds when the daemon starts, or when the tier comes back with another directory."""

from __future__ import annotations

from functools import partial

from cachesvc.core.model import ExtentId
from cachesvc.core.records.tier_state import TierState
from cachesvc.core.tiering.copies import Copies


def recover(copies: Copies, tier: TierState, extents: dict[ExtentId, int]) -> None:
    """Take over the extents that a tier held at start, and their sizes in bytes, as dormant ones. An extent that has an
    entry already, say because another tier holds it too, gets its copy at once."""
    known = [extent for extent in extents if extent in copies.entries] if copies.entries else []
    if known:
        extents = {extent: size for extent, size in extents.items() if extent not in copies.entries}
    tier.dormant.add(extents, partial(copies.activate, tier))
    tier.used_bytes += tier.dormant.size_bytes
    for extent in known:
        entry = copies.entries[extent]
        tier.used_bytes += entry.size_bytes
        copies.adopt(entry, tier)


def replace_directory(copies: Copies, tier: TierState, extents: dict[ExtentId, int]) -> None:
    """Forget all copies of a lost tier, and take over the extents of its new directory."""
    for copy in copies.copies_in(tier):
        copies.drop_with_directory(copy)
    tier.used_bytes -= tier.dormant.size_bytes
    tier.dormant.clear()
    recover(copies, tier, extents)
