"""Tiers that come with what they hold, change their budgets, are lost, and come back."""

from __future__ import annotations

from cachesvc.core import events as ev
from cachesvc.core.copies import Copies
from cachesvc.core.prefetch import Prefetches
from cachesvc.core.readers import Readers
from cachesvc.core.scrub import Scrub


class Outages:
    """What follows for copies, readers and prefetches when a whole tier changes. Each but a resize is O(extents)."""

    def __init__(self, copies: Copies, readers: Readers, prefetches: Prefetches, scrub: Scrub) -> None:
        self._copies = copies
        self._policy = copies.policy
        self._readers = readers
        self._prefetches = prefetches
        self._scrub = scrub

    def recovered(self, event: ev.Recovered) -> None:
        """Take up what a tier held at start."""
        self._copies.found(self._policy.tiers[event.tier], event.extents)
        self._scrub.admit(event.extents, event.tier)

    def resized(self, event: ev.Resized) -> None:
        """Go by another budget from here on."""
        self._policy.resize(self._policy.tiers[event.tier], event.budget_bytes)

    def shrink(self) -> None:
        """Evict what is too much for a budget, as far as nobody uses or pinned it: the kept last. One that shrank under
        a fill or a lease is met once that ends."""
        for tier in self._policy.tiers.values():
            if tier.budget_bytes + tier.evicting_bytes < tier.used_bytes + tier.held_bytes:
                for copy in self._policy.overflow(tier):
                    self._copies.evict(copy)

    def lost(self, event: ev.TierLost) -> None:
        """Grant nothing from a tier and fill nothing into it; what was being filled there goes elsewhere."""
        tier = self._policy.tiers[event.tier]
        tier.lost = True
        self._scrub.lost(tier.name)
        self._copies.rejudge(tier)
        self._retune()
        for copy in [each for each in self._copies.filling if each.tier is tier]:
            self._readers.want(copy.entry)
            self._prefetches.refill(copy.entry)  # a prefetch takes it elsewhere too: the answer may be long

    def back(self, event: ev.TierBack) -> None:
        """Grant again what a tier has."""
        tier = self._policy.tiers[event.tier]
        tier.lost = False
        self._retune()
        for entry in tuple(self._copies.entries.values()):
            if entry.waiters and entry.ready:
                self._readers.answer(entry)
        self._copies.rejudge(tier)

    def renewed(self, event: ev.Renewed) -> None:
        """Take up what a lost tier holds in its new directory, in place of all that it held."""
        tier = self._policy.tiers[event.tier]
        for copy in self._copies.of(tier):
            if copy.leases:
                self._readers.detach(copy)
        self._copies.renew(tier, event.extents)
        self._scrub.admit(event.extents, event.tier)
        self._policy.retry(tier)

    def _retune(self) -> None:
        self._policy.retune()
        for entry in self._copies.entries.values():
            was_ready = entry.ready
            self._copies.note(entry)
            if was_ready and not entry.ready:
                self._prefetches.refill(entry)
