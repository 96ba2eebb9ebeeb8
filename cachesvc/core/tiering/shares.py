"""Claimed datasets, and how much of each may be kept: what quotas allow, and its share of the room.

Datasets share the room to keep, first come, first served, while there is some. A dataset's share is the room times its
part of all claimed bytes; it counts when there is no room left (`policy.py`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from cachesvc.core.model import DatasetId, TierName
from cachesvc.core.records.dataset_state import DatasetState
from cachesvc.core.records.residency import CacheEntry, Role, TierState
from cachesvc.core.tiering.budgets import capacity_bytes, working
from cachesvc.core.tiering.hit_bounds import bounds, claim_of


class Shares:
    """Datasets by id, from their first claim to the end of the last."""

    def __init__(self, tiers: Mapping[TierName, TierState]) -> None:
        self._tiers = tiers
        self.datasets: dict[DatasetId, DatasetState] = {}
        self.others_bytes = 0
        """The room of the cluster's other members."""
        self.claimed_bytes = 0
        """Bytes of all claimed extents that jobs of this node may read, each counted once."""
        self.owned_bytes = 0
        """The part of `claimed_bytes` that this node owns."""
        self.foreign_kept_bytes = 0
        """Kept bytes of extents that other nodes own."""
        self.below_share: set[DatasetState] = set()
        """Datasets below their share that lately found no room to keep more. While there are any, others take no more than
        their share."""

    def add(self, dataset: DatasetState) -> None:
        """Add a dataset that claims none of its extents yet."""
        self.datasets[dataset.id] = dataset

    def remove(self, dataset: DatasetState) -> None:
        """Forget a dataset that has given up its extents."""
        del self.datasets[dataset.id]
        self.below_share.discard(dataset)

    def join(self, dataset: DatasetState, entry: CacheEntry) -> None:
        """Add a dataset's claim of an extent."""
        if not entry.datasets:
            self.claimed_bytes += entry.size_bytes
            self.owned_bytes += entry.size_bytes * entry.owned
        entry.datasets.append(dataset)
        dataset.join(entry.size_bytes, entry.ready)

    def leave(self, dataset: DatasetState, entry: CacheEntry) -> None:
        """Remove a dataset's claim of an extent."""
        entry.datasets.remove(dataset)
        dataset.leave(entry.size_bytes, entry.ready)
        if not entry.datasets:
            self.claimed_bytes -= entry.size_bytes * (not entry.unread)
            self.owned_bytes -= entry.size_bytes * entry.owned
            entry.unread = False

    def resize(self, entry: CacheEntry, by: int) -> None:
        """Count an extent, whose size changes, with `by` bytes more."""
        if entry.datasets:
            self.claimed_bytes += by * (not entry.unread)
            self.owned_bytes += by * entry.owned
        for dataset in entry.datasets:
            dataset.resize(by, entry.ready)
        for copy in entry.copies:
            if copy.home is not None:
                copy.home.kept_bytes += by
                self.foreign_kept_bytes += by * (not entry.owned)

    def set_owned(self, entry: CacheEntry, owned: bool, unread: bool = False) -> None:
        """Mark an extent as owned by this node, or by another one. `unread`: no job here reads it."""
        if entry.unread != unread and entry.datasets:
            self.claimed_bytes += entry.size_bytes * (entry.unread - unread)
            entry.unread = unread
        if entry.owned == owned:
            return
        size, entry.owned = (entry.size_bytes if owned else -entry.size_bytes), owned
        self.owned_bytes += size * bool(entry.datasets)
        self.foreign_kept_bytes -= size * sum(copy.role is Role.KEPT for copy in entry.copies)

    def bound_of(self, dataset: DatasetState) -> float:
        """The best hit rate that a dataset can have beside the others, given quotas, pins, and the room of the cluster's
        other members. O(datasets)."""
        every, capacity = list(self.datasets.values()), capacity_bytes(self._tiers)
        if not dataset.local:
            capacity += self.others_bytes
        if dataset not in every or not any(each.pinned or each.limited for each in every):
            return min(1.0, capacity / self.claimed_bytes) if self.claimed_bytes else 1.0
        # extents that two datasets share count once, so each counts for a part of its size
        part = self.claimed_bytes / max(1, sum(each.size_bytes for each in every))
        of_user: Counter[int] = Counter()
        for each in every:
            of_user[each.user] += each.size_bytes
        claims = [claim_of(each, part, of_user[each.user]) for each in every]
        return bounds(capacity, claims)[every.index(dataset)]

    def share_bytes(self, dataset: DatasetState) -> float:
        """A dataset's part, by size, of what can be kept."""
        room = sum(tier.keep_bytes for tier in working(self._tiers))
        total = sum(each.size_bytes for each in self.datasets.values())
        return room * dataset.size_bytes / total if total else 0.0

    def leaves_room(self, entry: CacheEntry) -> bool:
        """Return whether one more extent of its dataset may be kept, given the datasets that are below their share."""
        home = entry.datasets[0]
        if not self.below_share or home in self.below_share:
            return True
        return home.kept_bytes + entry.size_bytes <= self.share_bytes(home)

    def spare_bytes(self) -> dict[DatasetState, float]:
        """Kept bytes of each dataset beyond its share; below zero where it has less. Holds from before the restart count as
        room, for they are recalled (`core/node/reclaim.py`). O(datasets)."""
        room = sum(max(0, tier.budget_bytes - tier.reserve_bytes) for tier in working(self._tiers))
        total = max(1, sum(each.size_bytes for each in self.datasets.values()))
        return {each: each.kept_bytes - room * each.size_bytes / total for each in self.datasets.values()}

    def within_quota(self, entry: CacheEntry) -> bool:
        """Return whether one more extent of its dataset may be kept: within quotas, or because it is pinned without any."""
        if not entry.datasets or any(dataset.exempt for dataset in entry.datasets):
            return True
        return entry.size_bytes <= self.quota_left(entry.datasets[0])

    def beyond_quota(self, entry: CacheEntry) -> bool:
        """Return whether more of its dataset is kept than quotas allow, as after another user's pin began or ended."""
        exempt = any(dataset.exempt for dataset in entry.datasets)
        return not exempt and self.quota_left(entry.datasets[0]) < 0

    def quota_left(self, dataset: DatasetState) -> float:
        """Bytes that a dataset's quotas still allow to be kept; inf without a quota."""
        left = math.inf
        if dataset.quota_bytes is not None:
            left = dataset.quota_bytes - dataset.kept_bytes
        if dataset.user_quota_bytes is not None:
            kept = sum(each.kept_bytes for each in self.datasets.values() if each.user == dataset.user)
            left = min(left, dataset.user_quota_bytes - kept)
        return left
