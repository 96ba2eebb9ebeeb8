"""Room that kept copies leave to others: in one tier the window through which the rest streams, and in each tier the
share of readers without a plan.

There is no window where all data fits. Otherwise it holds what plans read side by side and the node does not keep, and as
much again, because the next of it is fetched meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain

from cachesvc.core.model import DEFAULT_WINDOW_BYTES, RAM, TierName
from cachesvc.core.records.residency import TierState
from cachesvc.core.tiering.budgets import by_preference, capacity_bytes
from cachesvc.core.tiering.hit_bounds import claim_of, not_kept
from cachesvc.core.tiering.shares import Shares

WINDOW_SHARE = 0.006
"""The window as a part of the claimed bytes. It is taken from what is kept, so the hit rate stays below its bound by as
much. It lets fills run a tenth of an hour ahead in an epoch of a day, which is enough to be paced evenly. The members of a
cluster share it by their room: each reads a part of the data."""
MOST_OF_CLAIMED = 0.75
"""Where this part of the claimed bytes is read side by side and does not fit, a window saves no more than keeping."""
ORDERS_AHEAD = 2
"""Where RAM reads ahead of NVMe: what a plan reads side by side, and as much again, which is copied meanwhile."""
SOURCES = 2
"""Source extents of prepared datasets, which nothing keeps, have room: the one that is read and the next one."""
WINDOW_EXTENTS = 2
"""A window holds at least the extent that is being read and the next one."""


class Reserve:
    """The window's size and tier, and the unplanned share. It sets the reserves of tiers, nothing else."""

    def __init__(
        self,
        tiers: Mapping[TierName, TierState],
        shares: Shares,
        lookahead_bytes: int | None,
        unplanned_share: float,
    ) -> None:
        self._tiers = tiers
        self._shares = shares
        self._lookahead_bytes = lookahead_bytes
        self._unplanned_share = unplanned_share
        self.tier: TierState | None = None
        self.window_bytes = 0
        self.ahead_of_nvme = False
        """All claimed data fits, and small samples on NVMe are copied into RAM before plans need them."""
        self.has_window = False
        """Room is reserved for the window."""
        self.streams = False
        """More is claimed than can be kept, so part of it streams through the window."""
        self.largest_bytes = 0
        """The largest claimed extent that fits a tier that works."""
        self.open_bytes = 0
        """The most bytes that all plans together read side by side, kept ones included."""
        self._reads: Mapping[int, tuple[int, int]] = {}
        """The same for each user who has plans, with the part that was not kept: (open, absent)."""
        self._absent_bytes = 0
        """The part of `open_bytes` that was not kept when the plans began."""
        self._opened_bytes = 0
        """What plans read side by side and the node does not keep."""
        self._opened: dict[int, int] = {}
        """The same by user."""
        self._most_opened_bytes = 0
        """How much of a user's bytes counts against the other users."""
        self.retune()

    def set_reads(self, reads: Mapping[int, tuple[int, int]]) -> None:
        """Set, for each user, how many bytes its plans read side by side, and how many were not kept when they began."""
        self._reads = reads
        self.open_bytes = sum(open_bytes for open_bytes, _ in reads.values())
        self._absent_bytes = sum(absent_bytes for _, absent_bytes in reads.values())
        self.retune()

    def ahead_bytes(self, user: int | None = None) -> int:
        """Bytes that all plans together may have fetched ahead and not read: what the extents that are read side by side
        leave of the window. What a user reads beyond its part leaves less to that user alone. 0 where they fill the
        window: then each extent is fetched when it is demanded."""
        most = self._most_opened_bytes
        beyond = 0 if user is None else max(0, self._opened.get(user, 0) - most)
        return max(0, self.window_bytes - sum(min(each, most) for each in self._opened.values()) - beyond)

    def oversubscribed_by(self, user: int) -> bool:
        """Return whether a user's plans read more side by side than its part of the window holds."""
        return self.streams and self._opened.get(user, 0) > self._most_opened_bytes

    def taken_from(self, user: int) -> bool:
        """Return whether another user's plans read more than their part, and this user's do not."""
        return not self.oversubscribed_by(user) and any(map(self.oversubscribed_by, self._opened))

    @property
    def oversubscribed(self) -> bool:
        """True if plans read more side by side than the window holds: readers should hold nothing between reads."""
        return self.streams and self.window_bytes - self._opened_bytes < self.largest_bytes

    def retune(self) -> None:
        """Set the window anew after claims, tiers or held bytes changed."""
        works, shares = by_preference(self._tiers), self._shares
        most = max((tier.budget_bytes for tier in works), default=0)
        largest = chain.from_iterable(each.largest_bytes.values() for each in shares.datasets.values())
        self.largest_bytes = max((each for each in largest if each <= most), default=0)
        self.streams = self.ahead_of_nvme = self.has_window = False
        self._reserve_unplanned()
        capacity = capacity_bytes(self._tiers) - sum(tier.unplanned_share_bytes for tier in works)
        self._opened_bytes = self._not_kept_bytes(capacity, self.open_bytes, self._absent_bytes)
        self._opened = {user: self._not_kept_bytes(capacity, *read) for user, read in self._reads.items()}
        self.tier = max(works, key=self._suits, default=None)
        if self.tier is None:
            self.window_bytes = self._opened_bytes = 0
            self._opened = {}
            return
        room = self.tier.budget_bytes - self.tier.unplanned_share_bytes
        self.window_bytes = min(room, self._wanted_bytes(capacity))
        spill = (len(works) - 1) * self.largest_bytes
        sources_bytes = min(
            room, SOURCES * max((each.largest_source_bytes for each in shares.datasets.values()), default=0)
        )
        self.tier.reserve_bytes += sources_bytes
        spare = capacity - shares.claimed_bytes - spill - sources_bytes
        ahead_bytes = self._ahead_of_nvme_bytes(room) if spare >= 0 else 0
        if 0 < ahead_bytes <= spare:  # it costs no hit
            self.ahead_of_nvme, self.window_bytes = self._reads_small, ahead_bytes
        self._most_opened_bytes = self._share_out()
        self.has_window = spare < 0 or 0 < ahead_bytes <= spare
        if self.has_window:
            self.tier.reserve_bytes += self.window_bytes
        self.streams = spare < 0

    @property
    def _reads_small(self) -> bool:
        """Whether some claimed data has small samples."""
        return any(each.small_samples for each in self._shares.datasets.values())

    def _ahead_of_nvme_bytes(self, room: int) -> int:
        """Room in RAM for reading ahead of NVMe where all data fits; 0 where that is of no use.

        For small samples a window that moves with the plans makes all reads fast, where as many kept bytes would make a
        part of them fast. For large ones it only takes the disk's latency away.
        """
        if self.tier is None or self.tier.name != RAM or self._shares.claimed_bytes <= self.tier.budget_bytes:
            return 0
        if not self._reads_small or self._lookahead_bytes is not None:
            return self.window_bytes if self.tier.budget_bytes >= 2 * self.window_bytes else 0
        if max(self.largest_bytes, self.open_bytes) > room:
            return 0
        return min(
            room, ORDERS_AHEAD * self.open_bytes or min(room // 2, ORDERS_AHEAD * DEFAULT_WINDOW_BYTES)
        )

    def _reserve_unplanned(self) -> None:
        """Reserve the share of readers without a plan, of what is neither held by readers nor pinned."""
        capacity = capacity_bytes(self._tiers)
        share = self._unplanned_share * max(0.0, 1 - self._pinned_bytes() / max(1, capacity))
        for tier in self._tiers.values():
            tier.unplanned_share_bytes = int(share * max(0, tier.budget_bytes - tier.held_bytes))
            tier.reserve_bytes = tier.unplanned_share_bytes

    def _share_out(self) -> int:
        """The level up to which what a user reads side by side counts. Users share the parts that others do not need. One
        extent to look ahead is left to each user, in at most half of the window where there are many."""
        users, window = max(1, len(self._opened)), self.window_bytes
        left = window - min(users * self.largest_bytes, max(self.largest_bytes, window // 2))
        level = left // users
        for others, opened in enumerate(sorted(self._opened.values())):
            level = left // (users - others)
            left -= min(opened, level)
        return level

    def _suits(self, tier: TierState) -> tuple[bool, int]:
        """The sort key of a tier for the window: RAM first where it has room for what is read side by side, then by
        room."""
        room = tier.budget_bytes - tier.held_bytes
        return tier.name == RAM and room >= max(self.largest_bytes, self._opened_bytes), room

    def _wanted_bytes(self, capacity: int) -> int:
        if self._lookahead_bytes is not None:
            return self._lookahead_bytes
        least, opened = WINDOW_EXTENTS * self.largest_bytes, self._opened_bytes
        claimed, datasets = self._shares.claimed_bytes, self._shares.datasets.values()
        # what is read now and not kept, and at least as much again: the next of it is fetched meanwhile
        others = self._shares.others_bytes
        mine = WINDOW_SHARE * claimed * capacity / max(1, capacity + others)
        wanted = opened + max(int(mine), 2 * opened if others else opened)
        most = capacity // 8
        if opened < capacity or self.open_bytes < MOST_OF_CLAIMED * claimed:
            most += opened
        most = min(most, capacity // (2 if len(datasets) > 1 else 1))
        unkept = capacity - int(sum(claim_of(each, 1.0, each.size_bytes).quota_bytes for each in datasets))
        if unkept > 0:  # no quota allows this room to be kept
            most = min(most, max(unkept, capacity // 8))
        return max(least, min(wanted, most))

    def _not_kept_bytes(self, capacity: int, open_bytes: int, absent_bytes: int) -> int:
        """The part of what plans read side by side that is not kept, in whole extents."""
        pinned = self._pinned_bytes()
        claimed, room = self._shares.claimed_bytes - pinned, max(0, capacity - pinned)
        absent = not_kept(open_bytes, absent_bytes, claimed, room)
        return math.ceil(round(absent / max(1, self.largest_bytes), 1)) * self.largest_bytes

    def _pinned_bytes(self) -> int:
        return sum(dataset.kept_bytes for dataset in self._shares.datasets.values() if dataset.pinned)
