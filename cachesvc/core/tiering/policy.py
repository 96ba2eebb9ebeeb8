"""Decides where an extent goes and what is evicted for it: keep, then window, then least recently used.

Keeping a fixed part of a dataset of D bytes in a cache of C hits C/D of shuffled reads, the bound for every demand-fill
policy; replacing (LRU) hits about half its square. So a claimed extent that finds room is kept, and evicted only when the
claims change. Extents that are not kept stream through a reserve of one tier, the window (`stream_window.py`). Everything
else is LRU and evicted first, except for the share of readers without a plan.

When there is no room left to keep, a dataset that holds less than its share (`shares.py`) takes from those above theirs,
and never below it, so two datasets do not evict each other in turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from cachesvc.core.limits import FILL_TRIES
from cachesvc.core.model import RAM, Stay, TierName
from cachesvc.core.placement.view import View
from cachesvc.core.records.residency import CacheEntry, Copy, Role, TierState
from cachesvc.core.tiering.budgets import by_preference, working
from cachesvc.core.tiering.room import NOWHERE, Placement, first, free_room, make_room, oldest, take
from cachesvc.core.tiering.shares import Shares
from cachesvc.core.tiering.stream_window import Reserve


class Ownership:
    """Marks entries as owned or not. A node that is alone owns everything, and each node its prepared extents. Where jobs
    read a part of a dataset in all their epochs (`Planned.local`), the node owns that part, and nothing else of it."""

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._view: View | None = None

    @property
    def shared(self) -> bool:
        """The cluster has other members."""
        return self._view is not None and not self._view.alone

    def set(self, view: View) -> bool:
        """Take another view; return whether owners may have changed."""
        former, self._view = self._view, view
        return former is None or former.placement() != view.placement()

    def mark(self, entries: Sequence[CacheEntry]) -> None:
        """Bring the entries' `owned` up to date. O(entries x members)."""
        if self._view is None or self._view.alone:
            every = [True] * len(entries)
        else:
            every = self._view.owned([entry.id for entry in entries])
        for entry, owned in zip(entries, every, strict=True):
            local, unread = False, False
            if any(dataset.local for dataset in entry.datasets):
                local = any(dataset.reads(entry.id) for dataset in entry.datasets)
                unread = not local and all(dataset.local for dataset in entry.datasets)
            owned = (owned and not unread) or local or entry.made_from is not None
            self._shares.set_owned(entry, owned, unread)

    def turn(self, count: int) -> int:
        """The index of `count` at which this node begins, so that members that fetch the same extents begin at different
        ones."""
        if self._view is None:
            return 0
        names = self._view.names
        return count * names.index(self._view.me) // len(names)


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier and its budget in bytes."""

    name: TierName
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The numbers that the core's decisions depend on."""

    lookahead_bytes: int | None = None
    """Bytes of the window; None: what plans read side by side and the node does not keep, and as much again."""
    max_fills: int = 8
    """Fills at once: enough extents to fill 10 Gbit/s from a source of 90 MB/s a connection, each fill
    being several connections."""
    fill_bytes: int = 0
    """While all fills under way hold fewer bytes than this, more may start, up to `SMALL_FILLS` times `max_fills`: a small
    extent is a connection or two, and the latency of the source is most of its time. Set it to the bytes of one extent
    less than `max_fills`, so that no more bytes are under way than without it."""
    preparing: int = 8
    """Prepared extents that are made at once. Set it to the processor's cores."""
    share_prepared: bool = False
    """Other nodes are asked for prepared extents before they are made here."""
    max_attempts: int = FILL_TRIES
    """Tries of a fill before its readers get the error: about one second with the backoff, on top of the source's own
    retries."""
    scrub_bytes_per_s: int = 0
    """The rate at which copies on disk are verified in the background; 0: they are not."""
    unplanned_share: float = 0.0
    """The part of each tier that claims and plans leave to readers without a plan; it is LRU in itself."""
    full_s: float = 30.0
    """How long a full tier is not tried again: people make room, not time."""
    claim_step: int = 1_000
    """Extents that incremental work (`core/records/incremental.py`) handles in one event: 2 ms, 4 where they are
    resident."""
    hold_s: float = 60.0
    """How long after the start readers are believed that they hold memory from before it. They connect every second, and
    some seconds later on a machine without a spare core."""


SMALL_FILLS = 4


class Requester(Enum):
    """The party that wants room."""

    PLANNED_READER = 1
    """A waiting reader whose job has a plan."""
    UNPLANNED_READER = 2
    """A waiting reader whose job has none."""
    PLAN = 3
    PLAN_IN_ITS_PART = 4
    """A plan within its user's part of the window, while another user reads beyond its own part."""
    PREFETCH = 5
    """A prefetch takes room to keep, and none of the window."""
    LEAVING_NODE = 6
    """A node that leaves hands its extents on. They take room to keep, and none from other datasets."""


READERS = (Requester.PLANNED_READER, Requester.UNPLANNED_READER)


class Policy:
    """Decides by the tiers' accounts, and changes none of them."""

    def __init__(self, tiers: Sequence[TierSpec], settings: NodeSettings) -> None:
        self.settings = settings
        self.tiers = {spec.name: TierState(spec.name, spec.budget_bytes, spec.budget_bytes) for spec in tiers}
        self.shares = Shares(self.tiers)
        self.ownership = Ownership(self.shares)
        self.reserve = Reserve(self.tiers, self.shares, settings.lookahead_bytes, settings.unplanned_share)

    def keeps(self, entry: CacheEntry) -> bool:
        """Return whether this node may keep an extent. Where the claimed data does not fit, the extent's owner keeps
        it, so that the nodes of a cluster together keep as much as they can. Another node may keep an extent that it
        fetched from the source: no other node keeps it, since its owner is full or claims no such data. It does so only
        in room that its own extents leave. What only jobs of other nodes read is not kept."""
        if entry.unread and not entry.pinned:
            return False
        if entry.owned or entry.pinned or not self.reserve.streams:
            return True
        if not entry.ready or entry.from_peer:
            return False
        room = sum(tier.keep_bytes for tier in working(self.tiers))
        more = 0 if entry.kept else entry.size_bytes
        return self.shares.owned_bytes + self.shares.foreign_kept_bytes + more <= room

    def may_keep(self, entry: CacheEntry) -> bool:
        """Return whether an extent may be kept here as far as room allows: this node is to keep it, within quotas."""
        return self.keeps(entry) and self.shares.within_quota(entry)

    def fits(self, entry: CacheEntry) -> bool:
        """Return whether some tier that works is large enough for an extent."""
        return any(not tier.lost and entry.size_bytes <= tier.budget_bytes for tier in self.tiers.values())

    def room_to_keep(self, entry: CacheEntry, free: bool = True) -> bool:
        """Return whether an extent could be kept without an eviction; not `free`: without the eviction of a kept copy."""
        size = entry.size_bytes
        fits = (tier for tier in working(self.tiers) if tier.kept_bytes + size <= tier.keep_bytes)
        return any(tier.free_bytes >= size or not free for tier in fits) and self.may_keep(entry)

    def room_elsewhere(self, entry: CacheEntry) -> bool:
        """Return whether a tier without a copy of an extent could keep one without evicting a kept copy."""
        size, taken = entry.size_bytes, {copy.tier for copy in entry.copies}
        return self.may_keep(entry) and any(
            tier.kept_bytes + size <= tier.keep_bytes and size <= tier.free_bytes + tier.spare_bytes
            for tier in working(self.tiers)
            if tier not in taken
        )

    def stay(self, copy: Copy) -> Stay:
        """The time for which a reader may hold this copy. A kept copy: for good, or, if part of the data streams, until
        the plan has passed it, so that another may be kept in its place. A streaming copy: until a later read does not
        need it. A copy of small samples in a window that no plan has any more: for good. Where readers compete for the
        window, and for a recalled copy: for one read."""
        if copy.recalled:
            return "once"
        if copy.role is not Role.KEPT:
            moves = self.reserve.streams or self.reserve.ahead_of_nvme
            if not moves and copy.entry.kept and _small(copy):
                return "kept"
            return "once" if self.reserve.oversubscribed else "brief"
        passes = self.reserve.streams and not self.reserve.oversubscribed and copy.entry.needs
        return "brief" if passes or self.promotes(copy) else "kept"

    def promotes(self, copy: Copy) -> bool:
        """Return whether look-ahead copies this copy's extent into RAM before plans need it."""
        return self.reserve.ahead_of_nvme and _small(copy) and copy.tier.name != RAM

    @property
    def window_has_room(self) -> bool:
        """Kept copies leave more room in the window's tier than plans read side by side. Those that were kept before the
        window grew stay in it."""
        tier = self.reserve.tier
        return tier is not None and tier.budget_bytes - tier.kept_bytes > self.reserve.open_bytes

    def role(self, copy: Copy) -> Role:
        """The role of a resident, idle copy: claimed ones that this node is to keep are kept while there is room."""
        entry, tier = copy.entry, copy.tier
        if entry.datasets and self.keeps(entry) and not tier.lost and not _kept_elsewhere(copy):
            fits = tier.kept_bytes + entry.size_bytes <= tier.keep_bytes and self.shares.within_quota(entry)
            if copy.role is Role.KEPT or fits:
                return Role.KEPT
        return Role.AHEAD if entry.needs else Role.LRU

    def place(self, entry: CacheEntry, requester: Requester) -> Placement:
        """Choose the placement of a fill of `entry` now."""
        taken = {copy.tier.name for copy in entry.copies}
        tiers = [
            tier
            for tier in by_preference(self.tiers)
            if tier.name not in taken and not tier.stalled and entry.size_bytes <= tier.budget_bytes
        ]
        tiers.sort(key=lambda tier: tier is entry.avoid)
        if entry.datasets and self.may_keep(entry):
            # Datasets below their share take the room of what was handed on when they need it.
            handed_on = requester is Requester.LEAVING_NODE
            placement = (
                self._place_kept(entry, tiers) if handed_on or self.shares.leaves_room(entry) else None
            )
            if placement is None and not handed_on:
                placement = self._take_share(entry, tiers)
            if placement:
                return placement
        if requester in (Requester.PREFETCH, Requester.LEAVING_NODE):
            return NOWHERE
        if requester in (Requester.PLAN, Requester.PLAN_IN_ITS_PART):
            tiers = [tier for tier in tiers if tier is self.reserve.tier]
        return self._stream(entry, tiers, requester) or NOWHERE

    def promote(self, entry: CacheEntry) -> Placement:
        """Choose the placement of a copy that is promoted for reading ahead: RAM, if that evicts only LRU copies."""
        ram = self.tiers.get(RAM)
        if ram is None or ram.lost or any(copy.tier is ram for copy in entry.copies):
            return NOWHERE
        size = entry.size_bytes
        return free_room((ram,), size, Role.AHEAD) or make_room(ram, size) or NOWHERE

    def _place_kept(self, entry: CacheEntry, tiers: Sequence[TierState]) -> Placement | None:
        size = entry.size_bytes
        fits = [tier for tier in tiers if tier.kept_bytes + size <= tier.keep_bytes]
        return free_room(fits, size, Role.KEPT) or first(make_room(tier, size) for tier in fits)

    def _take_share(self, entry: CacheEntry, tiers: Sequence[TierState]) -> Placement | None:
        home, size = entry.datasets[0], entry.size_bytes
        if len(self.shares.datasets) < 2 or home.kept_bytes + size > self.shares.share_bytes(home):
            return None
        for tier in tiers:
            short = max(
                size - tier.free_bytes - tier.evicting_bytes, tier.kept_bytes + size - tier.keep_bytes
            )
            for other in self.shares.datasets.values():
                if other is home or other.id not in tier.kept:
                    continue
                victims, enough = take(reversed(tier.kept[other.id]), short)
                left = other.kept_bytes - sum(copy.entry.size_bytes for copy in victims)
                if victims and enough and left >= self.shares.share_bytes(other):
                    return Placement(victims=victims)
        return None

    def _stream(self, entry: CacheEntry, tiers: list[TierState], requester: Requester) -> Placement | None:
        size = entry.size_bytes
        role = Role.LRU if requester in READERS and not entry.needs else Role.AHEAD
        unplanned = requester is Requester.UNPLANNED_READER
        return (
            free_room(tiers, size, role)
            or first(make_room(tier, size, unplanned=unplanned) for tier in sorted(tiers, key=oldest))
            or first(make_room(tier, size, self._evictable(entry, tier, requester)) for tier in tiers)
        )

    def _evictable(self, entry: CacheEntry, tier: TierState, requester: Requester) -> Iterator[Copy]:
        """Copies that streaming may evict from a tier, in this order: spare LRU copies; kept ones beyond the room for them;
        for readers, what plans need again, the least recently used first, and then what they need last. The share of
        readers without a plan comes before the plans' copies for one of them, and after them for other readers. A read
        that no job declared takes nothing from plans: a scan of other data costs them no fill. A plan within its user's
        part also evicts what plans need again, where another user reads beyond its part."""
        spare = set[Copy]()
        for copy in tier.spare():
            spare.add(copy)
            yield copy
        yield from self._kept_beyond_room(tier)
        if requester is Requester.PLAN:
            return
        share = (copy for copy in tier.unused() if copy not in spare)
        if requester is Requester.UNPLANNED_READER:
            yield from share
        if entry.datasets:
            yield from tier.in_use  # fetched again later; without this, the reader would get nothing
            if requester in READERS:
                yield from reversed(tier.ahead)  # last: the fill of such a copy would have served no reader
        if requester is Requester.PLANNED_READER:
            yield from share

    def _kept_beyond_room(self, tier: TierState) -> Iterator[Copy]:
        excess = tier.kept_bytes - tier.keep_bytes
        if excess <= 0:
            return
        datasets = (each for each in self.shares.datasets.values() if each.id in tier.kept)
        for dataset in sorted(datasets, key=lambda each: self.shares.share_bytes(each) - each.kept_bytes):
            for copy in reversed(tier.kept[dataset.id]):
                if excess <= 0:
                    return
                excess -= copy.entry.size_bytes
                yield copy


def _small(copy: Copy) -> bool:
    return any(dataset.small_samples for dataset in copy.entry.datasets)


def _kept_elsewhere(copy: Copy) -> bool:
    others = (other for other in copy.entry.copies if other is not copy)
    return any(other.role is Role.KEPT and not other.tier.lost for other in others)
