"""The records that a node's state is made of: tiers, extents and their copies, datasets, readers, plans."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

from cachesvc.core.model import Counted, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.records.dormant import Found
from cachesvc.core.records.eviction_list import Shelf
from cachesvc.core.records.pre_restart_holds import Hold
from cachesvc.core.records.schedule import Schedule

if TYPE_CHECKING:
    from cachesvc.core.tiering.retention import Retention


MAX_EPOCHS = 16
"""Epochs of a dataset that are remembered: a report is about now."""


class Phase(Enum):
    """Where a copy is in its life; absent copies have no record."""

    FILLING = 1
    RESIDENT = 2
    EVICTING = 3


class Role(Enum):
    """Why a copy has its bytes: its share of a claim, a plan's window, or nothing but recent use."""

    KEPT = 1
    AHEAD = 2
    LRU = 3


@dataclass(slots=True, eq=False)
class Tier:
    """A tier's budget and where it goes: used (filling, resident, evicting) and held by readers."""

    name: TierName
    given_bytes: int
    budget_bytes: int
    """What was given; while the tier takes no more, what it held when it said so."""
    full_until: float = 0.0
    lost: bool = False
    stalled: bool = False
    """It has not answered for seconds, and may be lost soon."""
    corrupt_count: int = 0
    """Copies that failed their checksums."""
    scrubbed_bytes: int = 0
    evicted_bytes: int = 0
    used_bytes: int = 0
    kept_bytes: int = 0
    evicting_bytes: int = 0
    held_bytes: int = 0
    reserve_bytes: int = 0
    """What the keep leaves to others: the look-ahead window and `unplanned_bytes`; set by the policy."""
    unplanned_bytes: int = 0
    """Of `visited`, so much does not give way to claims and plans; set by the policy."""
    found: Found = field(default_factory=Found)
    lru: Shelf = field(default_factory=Shelf)
    visited: Shelf = field(default_factory=Shelf)
    """LRU copies that a reader without a plan took last, where such have a share."""
    ahead: Shelf = field(default_factory=Shelf)
    """Filled for a plan and not yet touched, in order of need."""
    in_use: Shelf = field(default_factory=Shelf)
    """Touched, and a plan comes back to it; the longest unused first."""
    kept: dict[DatasetId, Shelf] = field(default_factory=dict)
    committing: set[Copy] = field(default_factory=set)

    @property
    def free_bytes(self) -> int:
        """Bytes that can be reserved now; negative when readers hold more than the budget."""
        return self.budget_bytes - self.held_bytes - self.used_bytes

    @property
    def unused_bytes(self) -> int:
        """Bytes of `unused`."""
        return self.found.size_bytes + self.lru.size_bytes + self.visited.size_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of `spare`, to an extent."""
        return self.unused_bytes - min(self.visited.size_bytes, self.unplanned_bytes)

    def spare(self) -> Iterator[Copy]:
        """What gives way to claims and plans: all of `unused` but the share of readers without a plan, to an extent."""
        left = self.spare_bytes
        for copy in self.unused() if left else ():
            yield copy
            left -= copy.entry.size_bytes
            if left <= 0:
                return

    def unused(self) -> Iterator[Copy]:
        """What nobody claims or needs: the longest unused first, and last what readers without a plan took."""
        made = 0
        for copy in self.found.records():
            made += 1
            yield copy
        yield from islice(self.lru, made, None)  # the records just made came in front
        yield from self.visited

    @property
    def keep_bytes(self) -> int:
        """Bytes that may be kept here."""
        return max(0, self.budget_bytes - self.held_bytes - self.reserve_bytes)


@dataclass(slots=True, eq=False)
class Copy:
    """An extent's bytes, reserved or present, in one tier."""

    entry: Entry
    tier: Tier
    phase: Phase
    role: Role = Role.LRU
    home: Dataset | None = None
    """The dataset that a KEPT copy is charged to."""
    source: Copy | None = None
    """The copy that this one is being filled from."""
    leases: int = 0
    fills_from: int = 0
    committed: bool = True
    doomed: bool = False
    """Never granted again; dropped when nobody uses it."""
    asked_back: bool = False
    """Its room is needed: granted for one read only, and dropped when nobody uses it."""
    ahead_of: Window | None = None
    """Filled from the source by look-ahead for this window, not yet read: its first read is no hit."""
    touched: bool = False
    unplanned: bool = False
    """A reader without a plan took it last."""
    used_at: float = 0.0
    shelf: Shelf | None = None
    older: Copy | None = field(default=None, repr=False)
    """Its neighbours on the shelf."""
    younger: Copy | None = field(default=None, repr=False)

    @property
    def usable(self) -> bool:
        """May be granted now."""
        return self.phase is Phase.RESIDENT and not self.doomed and not self.tier.lost

    @property
    def pinned(self) -> bool:
        """A pin protects it: what is pinned beyond a quota is not kept, and gives way as anything else."""
        return self.role is Role.KEPT and self.entry.pinned

    @property
    def idle(self) -> bool:
        """Resident and used by nobody: no lease, no fill from it, no commit under way."""
        return self.phase is Phase.RESIDENT and not self.leases and not self.fills_from and self.committed


@dataclass(slots=True, eq=False)
class Entry:
    """One extent as this node knows it."""

    id: ExtentId
    size_bytes: int
    copies: list[Copy] = field(default_factory=list)
    waiters: list[tuple[ReaderId, int]] = field(default_factory=list)
    datasets: list[Dataset] = field(default_factory=list)
    needs: int = 0
    """How many plan entries inside their windows name it."""
    queued: frozenset[int] = frozenset()
    """The jobs in whose lines it stands."""
    ready: bool = False
    """Some copy is usable, as last counted in its datasets."""
    due_at: float | None = None
    attempts: int = 0
    failed: bool = False
    avoid: Tier | None = None
    """The tier whose fill failed last."""
    sourced_at: float = -1.0
    """When it was last fetched from the source, or a reader was sent there; -1 never."""
    from_peer: bool = False
    """The fill that brought it to this node had it from another one."""

    def best(self) -> Copy | None:
        """The copy to grant: the last one made (a promotion into RAM) when there are two."""
        for copy in reversed(self.copies):
            if copy.usable:
                return copy
        return None

    def home(self, job: int) -> Dataset | None:
        """The dataset that a job claims this extent of, else the one that was claimed first."""
        if len(self.datasets) > 1:
            return next((dataset for dataset in self.datasets if job in dataset.jobs), self.datasets[0])
        return self.datasets[0] if self.datasets else None

    def filling(self) -> bool:
        """A fill is under way into a tier that works."""
        return any(copy.phase is Phase.FILLING and not copy.tier.lost for copy in self.copies)

    @property
    def kept(self) -> bool:
        """Some copy of it is kept."""
        return any(copy.role is Role.KEPT for copy in self.copies)

    @property
    def pinned(self) -> bool:
        """Some dataset that holds it is pinned."""
        return any(dataset.pinned for dataset in self.datasets)


@dataclass(slots=True)
class Tally:
    """A dataset's demands and fills, counted since it was first declared."""

    hits: int = 0
    ahead: int = 0
    misses: int = 0
    refused: int = 0
    source_bytes: int = 0

    def count(self, grant: Counted, by: int = 1) -> None:
        """One more grant, or one fewer."""
        if grant == "hits":
            self.hits += by
        elif grant == "ahead":
            self.ahead += by
        else:
            self.misses += by


@dataclass(slots=True, eq=False)
class EpochTally:
    """One epoch of a dataset, as its plans pass it. `number` counts from 0 since the dataset was first declared."""

    number: int
    bound: float
    launch: int
    """The job whose epoch it is."""
    began_at: float
    """When the first of its plans did: what comes from the source later is no hit of any of them."""
    plans: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    """Those that have not ended."""
    broken: dict[int, int] = field(default_factory=dict)
    """Those that ended before they came to their end, by what they are known again by, and how far they came."""
    touched: int = 0
    hits: int = 0
    """Touched extents that cost the source nothing in that epoch."""


@dataclass(slots=True, eq=False)
class Dataset:
    """A claimed dataset: who claims it, and how far it is resident."""

    id: DatasetId
    extents: tuple[tuple[ExtentId, int], ...]
    tally: Tally
    size_bytes: int = 0
    largest_bytes: dict[int, int] = field(default_factory=dict)
    """Of its extents: of each power of two in eight parts, for not all may fit."""
    jobs: set[int] = field(default_factory=set)
    pinned: bool = False
    kept_bytes: int = 0
    ready_count: int = 0
    ready_bytes: int = 0
    failed: dict[ExtentId, tuple[int, str]] = field(default_factory=dict)
    stuck: dict[ExtentId, int] = field(default_factory=dict)
    """Extents that a prefetch found no room to keep, and their sizes in bytes."""
    prefetched: bool = False
    """All of it was asked for: what a lost tier or corruption takes is filled again."""
    prefetchers: set[int] = field(default_factory=set)
    """The jobs that asked for all of it."""
    prefetch_at: int = 0
    """The next extent that the prefetch looks at."""
    prefetch_turn: int = 0
    """When it last started a fill, counted in such fills: prefetches take turns."""
    user: int = -1
    """Who pinned it, else who claimed it first; what is kept of it counts for this user."""
    quota_bytes: int | None = None
    user_quota_bytes: int | None = None
    unpinned: tuple[int, int | None, int | None] | None = None
    """While it is pinned: the user and the quotas of whoever claimed it first."""
    epochs: deque[EpochTally] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))

    @property
    def claimed(self) -> bool:
        """By a job or a pin; else its end is under way."""
        return bool(self.jobs) or self.pinned

    @property
    def done(self) -> bool:
        """A prefetch has nothing left to do: every extent is resident, failed or known not to fit."""
        return self.ready_count + len(self.failed) + len(self.stuck) >= len(self.extents)

    @property
    def limited(self) -> bool:
        """A quota says how much of it may be kept."""
        return self.quota_bytes is not None or self.user_quota_bytes is not None

    @property
    def exempt(self) -> bool:
        """Whoever pinned it may keep all of it."""
        return self.pinned and not self.limited

    def pin(self, user: int, quota_bytes: int | None, user_quota_bytes: int | None) -> None:
        """It counts for this user, who pinned it, until `unpin`."""
        self.unpinned = self.unpinned or (self.user, self.quota_bytes, self.user_quota_bytes)
        self.pinned, self.user = True, user
        self.quota_bytes, self.user_quota_bytes = quota_bytes, user_quota_bytes

    def unpin(self) -> None:
        """It counts for whoever claimed it first."""
        assert self.unpinned is not None, "a pin that nobody made"
        self.user, self.quota_bytes, self.user_quota_bytes = self.unpinned
        self.pinned, self.unpinned = False, None

    def join(self, entry: Entry) -> None:
        """Count an extent as one of its own."""
        self.size_bytes += entry.size_bytes
        self._measure(entry.size_bytes)
        self.count(entry, int(entry.ready))

    def leave(self, entry: Entry) -> None:
        """Count it no more."""
        self.size_bytes -= entry.size_bytes
        self.count(entry, -entry.ready)

    def count(self, entry: Entry, by: int) -> None:
        """Count one of its extents as resident (1), or no more (-1)."""
        self.ready_count += by
        self.ready_bytes += by * entry.size_bytes

    def _measure(self, size_bytes: int) -> None:
        length = size_bytes.bit_length()
        part = length << 3 | (size_bytes << 3 >> max(0, length - 1)) & 7
        self.largest_bytes[part] = max(self.largest_bytes.get(part, 0), size_bytes)

    def fail(self, extent: ExtentId, code: int, message: str) -> None:
        """Record why an extent is not resident."""
        self.failed[extent] = (code, message)
        self.stuck.pop(extent, None)


@dataclass(slots=True, eq=False)
class Reader:
    """What a connection has out. `waiting` counts its unanswered requests an extent; `job` is whose turn they take;
    `recalls` is what it was asked for since it gave something back last."""

    job: int = 0
    leases: dict[ExtentId, list[Copy]] = field(default_factory=dict)
    waiting: dict[ExtentId, int] = field(default_factory=dict)
    held: dict[ExtentId, Hold] = field(default_factory=dict)
    recalls: int = 0


@dataclass(slots=True, eq=False)
class Window:
    """What the plans of one order share: ranks that read the same extents side by side need them once."""

    user: int = -1
    plans: set[int] = field(default_factory=set)
    open_bytes: int = 0
    """The most bytes of extents that the order reads side by side, and the part that was not kept when it began."""
    absent_bytes: int = 0
    ahead_bytes: int = 0
    """Fetched ahead by these plans, or on the way, and not yet read."""
    ahead: dict[Copy, None] = field(default_factory=dict)
    """Those copies, in the order in which their fills began."""
    moved_at: float = 0.0
    """When one of its plans began, or passed an entry, last."""
    turn: int = 0
    """When it last fetched ahead: of orders that need their next as soon, the one that waited longest is first."""
    retention: Retention | None = None


@dataclass(slots=True, eq=False)
class Plan:
    """A rank's order, and the part of it that has been entered: [passed, next)."""

    number: int
    job: int
    entries: tuple[tuple[ExtentId, int, int], ...]
    shared: Window
    launch: int = 0
    tally: EpochTally | None = None
    counted: int = 0
    """The step before which its extents count in its epoch already, from before its reader connected anew."""
    schedule: Schedule | None = None
    """Where the data does not fit: how far ahead the plan may fetch."""
    paced: bool = True
    """Not while it is being scheduled."""
    behind: bool = False
    """Some of what it passed is still to be given up."""
    next: int = 0
    passed: int = 0
    entered_bytes: int = 0
    window: list[tuple[int, int, int]] = field(default_factory=list)
    """Heap of (last_step, index, bytes that it counts for) of entries inside the window."""

    def enter(self, size_bytes: int) -> None:
        """Take the next entry into the window; it takes `size_bytes` of it."""
        heapq.heappush(self.window, (self.entries[self.next][2], self.next, size_bytes))
        self.entered_bytes += size_bytes
        self.next += 1

    def leave(self) -> Iterator[tuple[ExtentId, int]]:
        """The extents whose last step in the window has been passed, and that step, each once an entry."""
        while self.window and self.window[0][0] < self.passed:
            last_step, index, size_bytes = heapq.heappop(self.window)
            self.entered_bytes -= size_bytes
            yield self.entries[index][0], last_step

    def skip_passed(self) -> Iterator[tuple[ExtentId, int]]:
        """Move over entries that were consumed before they were entered, and name them and their last steps."""
        while self.next < len(self.entries) and self.entries[self.next][2] < self.passed:
            extent, _, last_step = self.entries[self.next]
            self.next += 1
            yield extent, last_step

    @property
    def ended(self) -> bool:
        """Nothing is left to enter."""
        return self.next >= len(self.entries)

    @property
    def urgency(self) -> tuple[int, int, int]:
        """The steps that remain until the next entry is needed, then whose turn it is, then its number."""
        return self.entries[self.next][1] - self.passed, self.shared.turn, self.number
