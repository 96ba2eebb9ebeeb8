"""Tiers that recover extents, change their budgets, stall, are lost, and come back."""

from __future__ import annotations

from functools import partial
from itertools import chain

from cachesvc.core import events as ev
from cachesvc.core.model import ExtentId
from cachesvc.core.node.prefetch import Prefetches
from cachesvc.core.node.readers import Readers
from cachesvc.core.node.scrub import Scrub
from cachesvc.core.records.residency import Copy, TierState
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.role_changes import RoleChanges
from cachesvc.core.tiering.room import take


class Outages:
    """Applies changes of tiers to copies, readers and prefetches. Budgets change nowhere else."""

    def __init__(
        self, copies: Copies, roles: RoleChanges, readers: Readers, prefetches: Prefetches, scrub: Scrub
    ) -> None:
        self._copies = copies
        self._roles = roles
        self._policy = copies.policy
        self._tiers = copies.policy.tiers
        self._context = copies.context
        self._readers = readers
        self._prefetches = prefetches
        self._scrub = scrub

    def recovered(self, event: ev.Recovered) -> None:
        """Take over the extents that a tier held at start."""
        self._recover(self._tiers[event.tier], event.extents)
        self._scrub.admit(event.extents, event.tier)

    def _recover(self, tier: TierState, extents: dict[ExtentId, int]) -> None:
        """Take over extents, and their sizes in bytes, as dormant ones. An extent that has an entry already, say because
        another tier holds it too, gets its copy at once."""
        copies, entries = self._copies, self._copies.entries
        known = [extent for extent in extents if extent in entries] if entries else []
        if known:
            for entry in map(entries.__getitem__, known):
                if entry.most_bytes and not entry.copies:
                    copies.resize(entry, extents[entry.id])
            extents = {extent: size for extent, size in extents.items() if extent not in entries}
        tier.dormant.add(extents, partial(copies.activate, tier))
        tier.used_bytes += tier.dormant.size_bytes
        for extent in known:
            tier.used_bytes += entries[extent].size_bytes
            copies.adopt(entries[extent], tier)

    def resized(self, event: ev.Resized) -> None:
        """Set another budget. While the tier is full, it may only get smaller."""
        tier = self._tiers[event.tier]
        tier.given_bytes = event.budget_bytes
        tier.budget_bytes = min(tier.budget_bytes, event.budget_bytes) if tier.full else event.budget_bytes
        self._policy.reserve.retune()

    def full(self, tier: TierState) -> None:
        """Mark a tier as full: it took no more bytes although its budget had room. Other programs fill its disk, or it is
        broken. For a while its budget is what it holds, so it evicts unpinned copies first and then refuses fills."""
        tier.full_until = self._context.now + self._policy.settings.full_s
        tier.budget_bytes = min(tier.given_bytes, tier.used_bytes + tier.held_bytes)
        self._policy.reserve.retune()

    def shrink_full(self, copy: Copy) -> None:
        """Shrink the budget of a full tier by a copy that it could not commit: another in its place would fail too."""
        tier = copy.tier
        if tier.full:
            tier.budget_bytes = max(0, tier.budget_bytes - copy.entry.size_bytes)
            self._policy.reserve.retune()

    def reopen(self) -> None:
        """Try tiers again whose time as full is over."""
        for tier in self._tiers.values():
            if tier.full and tier.full_until <= self._context.now:
                self._retry(tier)

    def _retry(self, tier: TierState) -> None:
        """Stop treating a tier as full."""
        tier.full_until, tier.budget_bytes = 0.0, tier.given_bytes
        self._policy.reserve.retune()

    def shrink(self) -> None:
        """Evict what exceeds a budget, as far as it is idle and not pinned: LRU copies, then windows, then kept ones.
        What a fill or a lease protects is evicted once that ends."""
        for tier in self._tiers.values():  # runs after each event, so it calls nothing in the common case
            if tier.budget_bytes + tier.evicting_bytes < tier.used_bytes + tier.held_bytes and not tier.lost:
                lists = chain(tier.unused(), tier.in_use, tier.ahead, *tier.kept.values())
                for copy in take(lists, -tier.free_bytes - tier.evicting_bytes)[0]:
                    self._copies.evict(copy)

    def stalled(self, event: ev.Stalled) -> None:
        """Fill nothing into a tier while it does not answer. Its copies are granted all the same."""
        self._tiers[event.tier].stalled = event.stalled

    def lost(self, event: ev.TierLost) -> None:
        """Grant nothing from a tier and fill nothing into it. Fills that are under way there begin elsewhere."""
        tier = self._tiers[event.tier]
        tier.lost = True
        self._scrub.lost(tier.name)
        self._roles.reassess_tier(tier)
        self._retune()
        for copy in self._copies.filling:
            if copy.preparer is not None and copy.source is not None and copy.source.tier is tier:
                self._copies.end_source(copy)  # the preparer has opened it, or reads elsewhere
        for copy in [each for each in self._copies.filling if each.tier is tier]:
            self._readers.ensure_fill(copy.entry)
            self._prefetches.refill(
                copy.entry
            )  # for a prefetch too: the answer of the lost tier may take long

    def back(self, event: ev.TierBack) -> None:
        """Grant again from a tier that works."""
        tier = self._tiers[event.tier]
        tier.lost = False
        self._retune()
        for entry in tuple(self._copies.entries.values()):
            if entry.waiters and entry.ready:
                self._readers.answer_waiters(entry)
        self._roles.reassess_tier(tier)

    def renewed(self, event: ev.Renewed) -> None:
        """Take over the extents of a lost tier's new directory in place of all that it held."""
        tier = self._tiers[event.tier]
        for copy in self._copies.copies_in(tier):
            if copy.leases:
                self._readers.end_leases(copy)
        for copy in self._copies.copies_in(tier):
            self._copies.drop_with_directory(copy)
        tier.used_bytes -= tier.dormant.size_bytes
        tier.dormant.clear()
        self._recover(tier, event.extents)
        self._scrub.admit(event.extents, event.tier)
        self._retry(tier)

    def _retune(self) -> None:
        self._policy.reserve.retune()
        for entry in self._copies.entries.values():
            was_ready = entry.ready
            self._copies.update_ready(entry)
            if was_ready and not entry.ready:
                self._prefetches.refill(entry)
