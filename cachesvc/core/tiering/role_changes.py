"""Gives copies the roles that they deserve after claims, pins, quotas or tiers have changed."""

from __future__ import annotations

from cachesvc.core.records.dataset_state import DatasetState
from cachesvc.core.records.residency import CacheEntry, Copy, Role, TierState
from cachesvc.core.tiering.copies import Copies


class RoleChanges:
    """Changes roles by the policy's rules. It has no state."""

    def __init__(self, copies: Copies) -> None:
        self._copies = copies
        self._policy = copies.policy

    def reassess(self, entry: CacheEntry) -> None:
        """Give all copies of an extent their roles anew after its claims, pins or quotas changed."""
        for copy in tuple(entry.copies):
            gone = copy.home is not None and copy.home not in entry.datasets
            if gone or (copy.home is not None and self._policy.shares.beyond_quota(entry)):
                self._copies.unlist(copy)
                copy.unplanned = False  # the copies of a job that ended are not part of the unplanned share
                self._copies.set_role(copy, Role.LRU)
                if entry.datasets and self._policy.shares.within_quota(entry):
                    self._copies.set_role(copy, Role.KEPT)
            self._reassess_copy(copy)

    def reassess_tier(self, tier: TierState) -> None:
        """Give the copies of a tier that was lost, or is back, their roles anew. Lost copies count against no quota, so
        their extents may be kept elsewhere. Copies that are back are kept as far as there is room, pinned ones always."""
        for copy in self._copies.copies_in(tier):
            if tier.lost:
                self._copies.unlist(copy)
                self._copies.set_role(copy, Role.LRU)
            self._reassess_copy(copy)
            if copy.entry.pinned:
                self.keep_pinned(copy.entry)

    def keep_pinned(self, entry: CacheEntry) -> None:
        """Keep a usable copy of a pinned extent, as far as quotas allow, even where there is no room to keep it."""
        copy = None if entry.kept or not self._policy.shares.within_quota(entry) else entry.best()
        if copy is not None:
            self._copies.unlist(copy)
            self._copies.set_role(copy, Role.KEPT)
            self._copies.settle(copy)

    def drop_kept_lists(self, dataset: DatasetState) -> None:
        """Drop the eviction lists of a dataset of which nothing is kept any more."""
        for tier in self._policy.tiers.values():
            tier.kept.pop(dataset.id, None)

    def _reassess_copy(self, copy: Copy) -> None:
        """Give a copy its role now, even where readers hold it for as long as they run."""
        if copy.eviction_list is not None and copy.role is self._policy.role(copy) is Role.LRU:
            return  # it keeps its place by age
        if copy.leases and copy.usable:
            self._copies.set_role(copy, self._policy.role(copy))
        self._copies.settle(copy)
