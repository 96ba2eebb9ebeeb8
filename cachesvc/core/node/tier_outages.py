"""Tiers that come with what they hold, change their budgets, are lost, and come back."""

from __future__ import annotations

from itertools import chain

from cachesvc.core import events as ev
from cachesvc.core.node.prefetch import Prefetches
from cachesvc.core.node.readers import Readers
from cachesvc.core.node.scrub import Scrub
from cachesvc.core.records.cache_entry import Copy
from cachesvc.core.records.tier_state import TierState
from cachesvc.core.tiering.copies import Copies
from cachesvc.core.tiering.recovery import recover, replace_directory
from cachesvc.core.tiering.role_changes import RoleChanges
from cachesvc.core.tiering.room import take


class Outages:
    """What follows for copies, readers and prefetches when a tier changes. Budgets are changed here alone."""

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
        """Take up what a tier held at start."""
        recover(self._copies, self._tiers[event.tier], event.extents)
        self._scrub.admit(event.extents, event.tier)

    def resized(self, event: ev.Resized) -> None:
        """Go by another budget from here on; but a tier that took no more a moment ago is not asked for more yet."""
        tier = self._tiers[event.tier]
        tier.given_bytes = event.budget_bytes
        full = tier.full_until > 0.0
        tier.budget_bytes = min(tier.budget_bytes, event.budget_bytes) if full else event.budget_bytes
        self._policy.reserve.retune()

    def full(self, tier: TierState) -> None:
        """A tier took no more although its budget had room: others fill its disk, or it is broken. What it
        holds is its budget for a while; so it gives up what is unpinned first, then refuses fills."""
        tier.full_until = self._context.now + self._policy.settings.full_s
        tier.budget_bytes = min(tier.given_bytes, tier.used_bytes + tier.held_bytes)
        self._policy.reserve.retune()

    def gave_up(self, copy: Copy) -> None:
        """A copy that could not stay is gone: where its tier is full, another in its place could not stay either."""
        tier = copy.tier
        if tier.full_until:
            tier.budget_bytes = max(0, tier.budget_bytes - copy.entry.size_bytes)
            self._policy.reserve.retune()

    def reopen(self) -> None:
        """Try tiers again that were full."""
        for tier in self._tiers.values():
            if tier.full_until and tier.full_until <= self._context.now:
                self._retry(tier)

    def _retry(self, tier: TierState) -> None:
        """Forget that a tier took no more."""
        tier.full_until, tier.budget_bytes = 0.0, tier.given_bytes
        self._policy.reserve.retune()

    def shrink(self) -> None:
        """Evict what is too much for a budget, as far as nobody uses or pinned it: LRU, then windows, then what is kept.
        One that shrank under a fill or a lease is met once that ends."""
        for tier in self._tiers.values():  # after each event, so nothing is called for it
            if tier.budget_bytes + tier.evicting_bytes < tier.used_bytes + tier.held_bytes and not tier.lost:
                lists = chain(tier.unused(), tier.in_use, tier.ahead, *tier.kept.values())
                for copy in take(lists, -tier.free_bytes - tier.evicting_bytes)[0]:
                    self._copies.evict(copy)

    def stalled(self, event: ev.Stalled) -> None:
        """Fill nothing into a tier while it does not answer; what it has is granted all the same."""
        self._tiers[event.tier].stalled = event.stalled

    def lost(self, event: ev.TierLost) -> None:
        """Grant nothing from a tier and fill nothing into it; what was being filled there goes elsewhere."""
        tier = self._tiers[event.tier]
        tier.lost = True
        self._scrub.lost(tier.name)
        self._roles.reassess_tier(tier)
        self._retune()
        for copy in [each for each in self._copies.filling if each.tier is tier]:
            self._readers.want(copy.entry)
            self._prefetches.refill(copy.entry)  # a prefetch takes it elsewhere too: the answer may be long

    def back(self, event: ev.TierBack) -> None:
        """Grant again what a tier has."""
        tier = self._tiers[event.tier]
        tier.lost = False
        self._retune()
        for entry in tuple(self._copies.entries.values()):
            if entry.waiters and entry.ready:
                self._readers.answer(entry)
        self._roles.reassess_tier(tier)

    def renewed(self, event: ev.Renewed) -> None:
        """Take up what a lost tier holds in its new directory, in place of all that it held."""
        tier = self._tiers[event.tier]
        for copy in self._copies.copies_in(tier):
            if copy.leases:
                self._readers.detach(copy)
        replace_directory(self._copies, tier, event.extents)
        self._scrub.admit(event.extents, event.tier)
        self._retry(tier)

    def _retune(self) -> None:
        self._policy.reserve.retune()
        for entry in self._copies.entries.values():
            was_ready = entry.ready
            self._copies.update_ready(entry)
            if was_ready and not entry.ready:
                self._prefetches.refill(entry)
