"""Where an extent goes and what gives way to it: keep, then window, then least recently used.

Keeping a fixed part of a dataset of D bytes in a cache of C hits C/D of shuffled reads, the bound for every
demand-fill policy; replacing (LRU) hits about half its square. So a claimed extent that finds room is kept
and gives way only when the claims change. What is not kept streams through a reserve of one tier, the
window (`stream_window.py`). Everything else is LRU and gives way first, but for the share of readers without a plan.

When there is no room left to keep, a dataset that holds less than its share (`shares.py`) takes from those above
theirs, and never below it, so two datasets do not take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

from cachesvc.core.model import RAM, Stay, TierName
from cachesvc.core.records.cache_entry import CacheEntry, Copy, Role
from cachesvc.core.records.tier_state import TierState
from cachesvc.core.tiering.budgets import by_preference, working
from cachesvc.core.tiering.room import NOWHERE, Placement, first, free_room, make_room, oldest, take
from cachesvc.core.tiering.shares import Shares
from cachesvc.core.tiering.stream_window import Reserve


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier and its budget in bytes."""

    name: TierName
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """The few numbers that the core's decisions depend on."""

    lookahead_bytes: int | None = None
    """Bytes of the window; None: what plans read side by side and the node does not keep, and as much again."""
    max_fills: int = 8
    """Fills at once: enough extents to fill 10 Gbit/s from a source of 90 MB/s a connection, each fill
    being several connections."""
    fill_bytes: int = 0
    """While all fills under way are fewer bytes than these, more may start, up to `SMALL_FILLS` times `max_fills`: a
    small extent is a connection or two, for which the latency of the source is most of the time. One extent less than
    `max_fills` of them, so that what is under way is no more than without it."""
    max_attempts: int = 4
    """Tries of a fill before its readers hear of it: with the backoff about one second in all, on top of
    the source's own retries."""
    scrub_bytes_per_s: int = 0
    """How fast copies on disk are verified in the background; 0: not."""
    unplanned_share: float = 0.0
    """The part of each tier that claims and plans leave to readers without a plan, least recently used in itself."""
    full_s: float = 30.0
    """How long a tier that was full is not asked for more: room comes by people, not by waiting."""
    claim_step: int = 1_000
    """Extents that a work in steps (`core/records/incremental.py`) does in one event: 2 ms, 4 where they are resident."""
    hold_s: float = 60.0
    """How long after the start readers are believed that they hold memory from before it; they knock every second, and
    on a machine without a core to spare some seconds later."""


SMALL_FILLS = 4


class Requester(Enum):
    """Who asks for room: a waiting reader whose job has a plan, one whose has none, a plan, one within a part that another
    user's readers take as well, or a prefetch that only keeps."""

    PLANNED_READER = 1
    UNPLANNED_READER = 2
    PLAN = 3
    PLAN_IN_ITS_PART = 4
    PREFETCH = 5


WAITING = (Requester.PLANNED_READER, Requester.UNPLANNED_READER)


class Policy:
    """Reads the tiers' accounts and decides; it changes none of them."""

    def __init__(self, tiers: Sequence[TierSpec], settings: NodeSettings) -> None:
        self.settings = settings
        self.tiers = {spec.name: TierState(spec.name, spec.budget_bytes, spec.budget_bytes) for spec in tiers}
        self.shares = Shares(self.tiers)
        self.reserve = Reserve(self.tiers, self.shares, settings.lookahead_bytes, settings.unplanned_share)

    def fits(self, entry: CacheEntry) -> bool:
        """Whether some tier that works is large enough for an extent."""
        return any(not tier.lost and entry.size_bytes <= tier.budget_bytes for tier in self.tiers.values())

    def room_to_keep(self, entry: CacheEntry, free: bool = True) -> bool:
        """Whether an extent could be kept without anything giving way; not `free`: without anything kept."""
        size = entry.size_bytes
        fits = (tier for tier in working(self.tiers) if tier.kept_bytes + size <= tier.keep_bytes)
        return any(tier.free_bytes >= size or not free for tier in fits) and self.shares.within_quota(entry)

    def room_elsewhere(self, entry: CacheEntry) -> bool:
        """Tell whether a tier without a copy of an extent could keep one and evict nothing that is kept."""
        size, taken = entry.size_bytes, {copy.tier for copy in entry.copies}
        return self.shares.within_quota(entry) and any(
            tier.kept_bytes + size <= tier.keep_bytes and size <= tier.free_bytes + tier.spare_bytes
            for tier in working(self.tiers)
            if tier not in taken
        )

    def stay(self, copy: Copy) -> Stay:
        """How long a reader may hold this copy. A kept one for good; but where part of the data streams, only until its
        plan has passed it, so that another may be kept in its place. One that streams until a later read leaves it; no
        longer than for one read where readers compete for the window, or the room for others."""
        if copy.recalled:
            return "once"
        if copy.role is not Role.KEPT:
            return "once" if self.reserve.tight else "brief"
        passes = self.reserve.streams and not self.reserve.tight and copy.entry.needs
        return "brief" if passes else "kept"

    def role(self, copy: Copy) -> Role:
        """The role of a resident copy that nobody uses: claimed ones are kept while there is room."""
        entry, tier = copy.entry, copy.tier
        if entry.datasets and not tier.lost and not _kept_elsewhere(copy):
            fits = tier.kept_bytes + entry.size_bytes <= tier.keep_bytes and self.shares.within_quota(entry)
            if copy.role is Role.KEPT or fits:
                return Role.KEPT
        return Role.AHEAD if entry.needs else Role.LRU

    def place(self, entry: CacheEntry, asked: Requester) -> Placement:
        """Where a fill of `entry` may go now."""
        taken = {copy.tier.name for copy in entry.copies}
        tiers = [
            tier
            for tier in by_preference(self.tiers)
            if tier.name not in taken and not tier.stalled and entry.size_bytes <= tier.budget_bytes
        ]
        tiers.sort(key=lambda tier: tier is entry.avoid)
        if entry.datasets and self.shares.within_quota(entry):
            free = self._keep(entry, tiers) if self.shares.leaves_room(entry) else None
            place = free or self._claim_share(entry, tiers)
            if place:
                return place
        if asked is Requester.PREFETCH:
            return NOWHERE
        if asked in (Requester.PLAN, Requester.PLAN_IN_ITS_PART):
            tiers = [tier for tier in tiers if tier is self.reserve.tier]
        return self._stream(entry, tiers, asked) or NOWHERE

    def promote(self, entry: CacheEntry) -> Placement:
        """Where a copy for reading ahead may go: RAM, as far as that costs nothing but LRU copies."""
        ram = self.tiers.get(RAM)
        if ram is None or ram.lost or any(copy.tier is ram for copy in entry.copies):
            return NOWHERE
        size = entry.size_bytes
        return free_room((ram,), size, Role.AHEAD) or make_room(ram, size) or NOWHERE

    def _keep(self, entry: CacheEntry, tiers: Sequence[TierState]) -> Placement | None:
        size = entry.size_bytes
        fits = [tier for tier in tiers if tier.kept_bytes + size <= tier.keep_bytes]
        return free_room(fits, size, Role.KEPT) or first(make_room(tier, size) for tier in fits)

    def _claim_share(self, entry: CacheEntry, tiers: Sequence[TierState]) -> Placement | None:
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

    def _stream(self, entry: CacheEntry, tiers: list[TierState], asked: Requester) -> Placement | None:
        size = entry.size_bytes
        role = Role.LRU if asked in WAITING and not entry.needs else Role.AHEAD
        unplanned = asked is Requester.UNPLANNED_READER
        return (
            free_room(tiers, size, role)
            or first(make_room(tier, size, unplanned=unplanned) for tier in sorted(tiers, key=oldest))
            or first(make_room(tier, size, self._gives_way(entry, tier, asked)) for tier in tiers)
        )

    def _gives_way(self, entry: CacheEntry, tier: TierState, asked: Requester) -> Iterator[Copy]:
        """All that streaming may displace in a tier: LRU, kept copies beyond the room for them, and for a
        waiting reader what plans come back to, the longest unused first, and then what they need last; the share of
        readers without a plan before those for one of them, after them for others. A read that no job declared takes
        nothing from plans: a scan of other data costs them no fill. A plan within its user's part displaces what plans
        come back to where another user's are beyond theirs."""
        given = set[Copy]()
        for copy in tier.spare():
            given.add(copy)
            yield copy
        yield from self._overflow(tier)
        if asked is Requester.PLAN:
            return
        share = (copy for copy in tier.unused() if copy not in given)
        if asked is Requester.UNPLANNED_READER:
            yield from share
        if entry.datasets:
            yield from tier.in_use  # fetched again later; but without it the reader would have nothing
            if asked in WAITING:
                yield from reversed(tier.ahead)  # late, for its fill would have served nobody
        if asked is Requester.PLANNED_READER:
            yield from share

    def _overflow(self, tier: TierState) -> Iterator[Copy]:
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


def _kept_elsewhere(copy: Copy) -> bool:
    others = (other for other in copy.entry.copies if other is not copy)
    return any(other.role is Role.KEPT and not other.tier.lost for other in others)
