"""Where an extent goes and what gives way to it: keep, then window, then least recently used.

Keeping a fixed part of a dataset of D bytes in a cache of C hits C/D of shuffled reads, the bound for every
demand-fill policy; replacing (LRU) hits about half its square. So a claimed extent that finds room is kept
and gives way only when the claims change. What is not kept streams through a reserve of one tier, the
window. Everything else is LRU and gives way first.

Datasets share what can be kept first come, first served while there is room. When there is none, one that
holds less than its share (the room times its part of all claimed bytes) takes from those above theirs, and
never below it, so two datasets do not take turns.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from cachesvc.core.bounds import bounds, claim_of, not_kept
from cachesvc.core.model import RAM, DatasetId, Stay, TierName
from cachesvc.core.room import NOWHERE, Place, make_room, oldest, take
from cachesvc.core.state import Copy, Dataset, Entry, Role, Tier


@dataclass(frozen=True, slots=True)
class TierSpec:
    """A tier and its budget in bytes."""

    name: TierName
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Settings:
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
    full_s: float = 30.0
    """How long a tier that was full is not asked for more: room comes by people, not by waiting."""
    claim_step: int = 1_000
    """Extents that a work in steps (`steps.py`) does in one event: 2 ms, 4 where they are resident."""
    hold_s: float = 600.0
    """How long after the start readers are believed that they hold memory from before it; they knock every second."""


SMALL_FILLS = 4
WINDOW_SHARE = 0.006
"""Of the claimed bytes. What streams is taken from what is kept, so this is what the hit rate stays below its
bound by; it lets fills run a tenth of an hour ahead in an epoch of a day, which is enough to be paced evenly."""
MOST_OF_IT = 0.75
"""Of the claimed bytes. Where as much is read side by side and does not fit, a window saves no more than what is kept."""
WINDOW_EXTENTS = 2
"""A window holds the extent that is read and the next at least."""


class Asked(Enum):
    """Who asks for room: a waiting reader, a plan, or a prefetch that only keeps."""

    DEMAND = 1
    PLAN = 2
    KEEP = 3


class Policy:
    """Reads the tiers' accounts and decides. Of a tier it changes the budget and what is reserved for the window, nothing
    else: accounts of copies are `copies.py`'s."""

    def __init__(self, tiers: Sequence[TierSpec], settings: Settings) -> None:
        self.settings = settings
        self.tiers = {spec.name: Tier(spec.name, spec.budget_bytes, spec.budget_bytes) for spec in tiers}
        self.datasets: dict[DatasetId, Dataset] = {}
        self.claimed_bytes = 0
        self.largest_bytes = 0
        """Of the claimed extents that fit a tier that works."""
        self.window: Tier | None = None
        self.streams = False
        """More is claimed than can be kept: part of it streams through the window."""
        self.window_bytes = 0
        self.opened_bytes = 0
        """What plans read side by side and the rest of the node does not keep."""
        self.open_bytes = 0
        """The most bytes that all plans together read side by side, kept ones included; set by `lookahead`."""
        self.absent_bytes = 0
        """The part of those that was not kept when the plans began."""
        self.retune()

    def full(self, tier: Tier, now: float) -> None:
        """A tier took no more although its budget had room: others fill its disk, or it is broken. What it
        holds is its budget for a while; so it gives up what is unpinned first, then refuses fills."""
        tier.full_until = now + self.settings.full_s
        tier.budget_bytes = min(tier.given_bytes, tier.used_bytes + tier.held_bytes)
        self.retune()

    def retry(self, tier: Tier) -> None:
        """Forget that a tier took no more."""
        tier.full_until, tier.budget_bytes = 0.0, tier.given_bytes
        self.retune()

    def resize(self, tier: Tier, budget_bytes: int) -> None:
        """A tier's budget changed; one that took no more a moment ago is not asked for more yet."""
        tier.given_bytes = budget_bytes
        tier.budget_bytes = min(tier.budget_bytes, budget_bytes) if tier.full_until else budget_bytes
        self.retune()

    def fits(self, entry: Entry) -> bool:
        """Whether some tier that works is large enough for an extent."""
        return any(entry.size_bytes <= tier.budget_bytes for tier in self.tiers.values() if not tier.lost)

    def overflow(self, tier: Tier) -> tuple[Copy, ...]:
        """What goes when a tier holds more than its budget: LRU, then windows, then what is kept."""
        short_bytes = -tier.free_bytes - tier.evicting_bytes
        if tier.lost:
            return ()
        shelves: tuple[Iterable[Copy], ...] = (tier.spare(), tier.in_use, tier.ahead, *tier.kept.values())
        return take(chain.from_iterable(shelves), short_bytes)[0]

    def reopen(self, now: float) -> None:
        """Try tiers again that were full."""
        for tier in self.tiers.values():
            if tier.full_until and tier.full_until <= now:
                self.retry(tier)

    def healthy(self) -> list[Tier]:
        """The tiers that work, in order of placement: RAM, then the emptiest."""
        works = [tier for tier in self.tiers.values() if not tier.lost]
        return sorted(works, key=lambda tier: (tier.name != RAM, tier.used_bytes / max(1, tier.budget_bytes)))

    def retune(self) -> None:
        """Set the window again after claims, tiers or held bytes changed. No window where all fits."""
        works = self.healthy()
        most = max((tier.budget_bytes for tier in works), default=0)
        largest = chain.from_iterable(each.largest_bytes.values() for each in self.datasets.values())
        self.largest_bytes = max((each for each in largest if each <= most), default=0)
        self.streams = False
        for tier in self.tiers.values():
            tier.reserve_bytes = 0
        self.opened_bytes = self._opened_bytes()
        self.window = max(works, key=self._suits_window, default=None)
        if self.window is None:
            self.window_bytes = self.opened_bytes = 0
            return
        self.window_bytes = min(self.window.budget_bytes, self._wanted_bytes())
        spill, capacity = (len(works) - 1) * self.largest_bytes, self.capacity_bytes()
        fits = self.claimed_bytes + spill <= capacity
        # where it fits, RAM still gives room to reading ahead of NVMe, if that costs no hit
        ram = self.window if self.window.name == RAM else None
        ahead = ram is not None and self.claimed_bytes > ram.budget_bytes >= 2 * self.window_bytes
        if not fits or (ahead and self.claimed_bytes + spill + self.window_bytes <= capacity):
            self.window.reserve_bytes = self.window_bytes
        self.streams = not fits

    def _suits_window(self, tier: Tier) -> tuple[bool, int]:
        """RAM where what is read side by side fits, beside what readers hold there."""
        room = tier.budget_bytes - tier.held_bytes
        return tier.name == RAM and room >= max(self.largest_bytes, self.opened_bytes), room

    def _wanted_bytes(self) -> int:
        if self.settings.lookahead_bytes is not None:
            return self.settings.lookahead_bytes
        least = WINDOW_EXTENTS * self.largest_bytes
        share, capacity = int(WINDOW_SHARE * self.claimed_bytes), self.capacity_bytes()
        # beside what is read now and not kept: as much again at least, for the next of it is fetched meanwhile
        wanted = self.opened_bytes + max(share, self.opened_bytes)
        most = capacity // 8
        if self.opened_bytes < capacity or self.open_bytes < MOST_OF_IT * self.claimed_bytes:
            most += self.opened_bytes
        most = min(most, capacity // (2 if len(self.datasets) > 1 else 1))
        claims = [claim_of(each, 1.0, each.size_bytes) for each in self.datasets.values()]
        unkept = capacity - int(sum(each.quota_bytes for each in claims))
        if unkept > 0:  # quotas leave it to nobody, and what others keep to them
            most = min(most, max(unkept, capacity // 8))
        return max(least, min(wanted, most))

    def _opened_bytes(self) -> int:
        pinned = sum(dataset.kept_bytes for dataset in self.datasets.values() if dataset.pinned)
        claimed, room = self.claimed_bytes - pinned, max(0, self.capacity_bytes() - pinned)
        absent = not_kept(self.open_bytes, self.absent_bytes, claimed, room)
        return math.ceil(round(absent / max(1, self.largest_bytes), 1)) * self.largest_bytes

    def ahead_bytes(self) -> int:
        """How much all plans together may have fetched ahead and not read: what the extents that are read side
        by side leave of the window. 0 where they fill it: then each is fetched when it is demanded."""
        return max(0, self.window_bytes - self.opened_bytes)

    @property
    def tight(self) -> bool:
        """Plans read more side by side than the window holds: a reader should hold nothing between reads."""
        return self.streams and self.ahead_bytes() < self.largest_bytes

    def capacity_bytes(self) -> int:
        """Bytes of all tiers that work, less what readers hold outside of them."""
        works = (tier for tier in self.tiers.values() if not tier.lost)
        return sum(max(0, tier.budget_bytes - tier.held_bytes) for tier in works)

    def bound(self) -> float:
        """The best hit rate that any policy can reach: min(1, C/D) over all claimed bytes."""
        return min(1.0, self.capacity_bytes() / self.claimed_bytes) if self.claimed_bytes else 1.0

    def bound_of(self, dataset: Dataset) -> float:
        """The best hit rate that a dataset can have beside the others, their quotas and what is pinned. O(datasets)."""
        every = list(self.datasets.values())
        if dataset not in every or not any(each.pinned or each.limited for each in every):
            return self.bound()
        # extents that two datasets share count once, so each counts for a part of its size
        part = self.claimed_bytes / max(1, sum(each.size_bytes for each in every))
        of_user: Counter[int] = Counter()
        for each in every:
            of_user[each.user] += each.size_bytes
        claims = [claim_of(each, part, of_user[each.user]) for each in every]
        return bounds(self.capacity_bytes(), claims)[every.index(dataset)]

    def share_bytes(self, dataset: Dataset) -> float:
        """A dataset's part of what can be kept, by size."""
        room = sum(tier.keep_bytes for tier in self.tiers.values() if not tier.lost)
        total = sum(each.size_bytes for each in self.datasets.values())
        return room * dataset.size_bytes / total if total else 0.0

    def within_quota(self, entry: Entry) -> bool:
        """Whether one more extent of its dataset may be kept."""
        return not entry.datasets or entry.size_bytes <= self.quota_left(entry.datasets[0])

    def quota_left(self, dataset: Dataset) -> float:
        """Bytes of it that its quotas still let be kept; inf without one."""
        left = math.inf
        if dataset.quota_bytes is not None:
            left = dataset.quota_bytes - dataset.kept_bytes
        if dataset.user_quota_bytes is not None:
            kept = sum(each.kept_bytes for each in self.datasets.values() if each.user == dataset.user)
            left = min(left, dataset.user_quota_bytes - kept)
        return left

    def room_to_keep(self, entry: Entry, free: bool = True) -> bool:
        """Whether an extent could be kept without anything giving way; not `free`: without anything kept."""
        size = entry.size_bytes
        tiers = (tier for tier in self.tiers.values() if not tier.lost)
        fits = (tier for tier in tiers if tier.kept_bytes + size <= tier.keep_bytes)
        return any(tier.free_bytes >= size or not free for tier in fits) and self.within_quota(entry)

    def stay(self, copy: Copy) -> Stay:
        """How long a reader may hold this copy. A kept one for good; but where part of the data streams, only until its
        plan has passed it, so that another may be kept in its place. One that streams until a later read leaves it; no
        longer than for one read where readers compete for the window."""
        if copy.role is not Role.KEPT:
            return "once" if self.tight else "brief"
        passes = self.streams and not self.tight and copy.entry.needs
        return "brief" if passes else "kept"

    def role(self, copy: Copy) -> Role:
        """The role of a resident copy that nobody uses: claimed ones are kept while there is room."""
        entry, tier = copy.entry, copy.tier
        if entry.datasets and not tier.lost and not _kept_elsewhere(copy):
            fits = tier.kept_bytes + entry.size_bytes <= tier.keep_bytes and self.within_quota(entry)
            if copy.role is Role.KEPT or fits:
                return Role.KEPT
        return Role.AHEAD if entry.needs else Role.LRU

    def place(self, entry: Entry, asked: Asked) -> Place:
        """Where a fill of `entry` may go now."""
        taken = {copy.tier.name for copy in entry.copies}
        tiers = [t for t in self.healthy() if t.name not in taken and entry.size_bytes <= t.budget_bytes]
        tiers.sort(key=lambda tier: tier is entry.avoid)
        if entry.datasets and self.within_quota(entry):
            place = self._keep(entry, tiers) or self._claim_share(entry, tiers)
            if place:
                return place
        if asked is Asked.KEEP:
            return NOWHERE
        if asked is Asked.PLAN:
            tiers = [tier for tier in tiers if tier is self.window]
        return self._stream(entry, tiers, asked) or NOWHERE

    def promote(self, entry: Entry) -> Place:
        """Where a copy for reading ahead may go: RAM, as far as that costs nothing but LRU copies."""
        ram = self.tiers.get(RAM)
        if ram is None or ram.lost or any(copy.tier is ram for copy in entry.copies):
            return NOWHERE
        if ram.free_bytes >= entry.size_bytes:
            return Place(ram, Role.AHEAD)
        return make_room(ram, entry.size_bytes) or NOWHERE

    def _keep(self, entry: Entry, tiers: Sequence[Tier]) -> Place | None:
        size = entry.size_bytes
        fits = [tier for tier in tiers if tier.kept_bytes + size <= tier.keep_bytes]
        for tier in fits:
            if tier.free_bytes >= size:
                return Place(tier, Role.KEPT)
        for tier in fits:
            if place := make_room(tier, size):
                return place
        return None

    def _claim_share(self, entry: Entry, tiers: Sequence[Tier]) -> Place | None:
        home, size = entry.datasets[0], entry.size_bytes
        if len(self.datasets) < 2 or home.kept_bytes + size > self.share_bytes(home):
            return None
        for tier in tiers:
            short = max(
                size - tier.free_bytes - tier.evicting_bytes, tier.kept_bytes + size - tier.keep_bytes
            )
            for other in self.datasets.values():
                if other is home or other.id not in tier.kept:
                    continue
                victims, enough = take(reversed(tier.kept[other.id]), short)
                left = other.kept_bytes - sum(copy.entry.size_bytes for copy in victims)
                if victims and enough and left >= self.share_bytes(other):
                    return Place(victims=victims)
        return None

    def _stream(self, entry: Entry, tiers: list[Tier], asked: Asked) -> Place | None:
        size = entry.size_bytes
        role = Role.AHEAD if entry.needs or asked is Asked.PLAN else Role.LRU
        for tier in tiers:
            if tier.free_bytes >= size:
                return Place(tier, role)
        for tier in sorted(tiers, key=oldest):
            if place := make_room(tier, size):
                return place
        for tier in tiers:
            if place := make_room(tier, size, self._gives_way(entry, tier, asked)):
                return place
        return None

    def _gives_way(self, entry: Entry, tier: Tier, asked: Asked) -> Iterator[Copy]:
        """All that streaming may displace in a tier: LRU, kept copies beyond the room for them, and for a
        waiting reader what plans come back to, the longest unused first, and then what they need last. A read
        that no job declared takes nothing from plans: a scan of other data costs them no fill."""
        yield from tier.spare()
        yield from self._overflow(tier)
        if asked is not Asked.DEMAND or not entry.datasets:
            return
        yield from tier.in_use  # fetched again later; but without it the reader would have nothing
        yield from reversed(tier.ahead)  # last, for its fill would have served nobody

    def _overflow(self, tier: Tier) -> Iterator[Copy]:
        excess = tier.kept_bytes - tier.keep_bytes
        if excess <= 0:
            return
        datasets = (each for each in self.datasets.values() if each.id in tier.kept)
        for dataset in sorted(datasets, key=lambda each: self.share_bytes(each) - each.kept_bytes):
            for copy in reversed(tier.kept[dataset.id]):
                if excess <= 0:
                    return
                excess -= copy.entry.size_bytes
                yield copy


def _kept_elsewhere(copy: Copy) -> bool:
    others = (other for other in copy.entry.copies if other is not copy)
    return any(other.role is Role.KEPT and not other.tier.lost for other in others)
