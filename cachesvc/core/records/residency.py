"""Extents as this node knows them, their copies, and the tiers that hold these.

Each tier orders the copies that it may evict in lists. Extents that it held at start and that no event has named since are
dormant: a daemon that starts over a million extents has their ids and sizes alone, in a tenth of the memory and time of
their records. The record of a copy is made when an event names its extent, or when its room is needed. Dormant extents are
evicted first, for no reader has used them for longest.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, KeysView
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice

from cachesvc.core.model import DatasetId, ExtentId, ReaderId, SourceExtent, TierName
from cachesvc.core.records.copy_phases import Phase
from cachesvc.core.records.dataset_state import DatasetState


class Role(Enum):
    """The reason why a copy is in its tier: a claim keeps it, a plan needs it, or it was used recently."""

    KEPT = 1
    AHEAD = 2
    LRU = 3


class Elsewhere(Enum):
    """Whether another node has a complete copy of a prepared extent."""

    UNKNOWN = 1
    ASKED = 2
    YES = 3
    NO = 4


@dataclass(slots=True, eq=False)
class Copy:
    """An extent's bytes, reserved or present, in one tier."""

    entry: CacheEntry
    tier: TierState
    phase: Phase = Phase.ABSENT
    role: Role = Role.LRU
    home: DatasetState | None = None
    """The dataset that a KEPT copy is charged to."""
    source: Copy | None = None
    """The copy that this one is being filled from, which of a prepared extent is one of its source extent; None where that
    is the source."""
    leases: int = 0
    fills_from: int = 0
    """Fills under way that read this copy."""
    committed: bool = True
    to_evict: bool = False
    """Never granted again; evicted as soon as it is idle."""
    recalled: bool = False
    """Its room is needed: granted for one read only, and evicted as soon as it is idle."""
    preparer: ReaderId | None = None
    """The process that prepares these bytes."""
    ahead_of: Ahead | None = None
    """The copies that look-ahead filled it with, until its first read: that read is no hit."""
    touched: bool = False
    unplanned: bool = False
    """A reader without a plan used it last."""
    passing: bool = False
    """No dataset declared it, and it was not read since others that came after it filled `TierState.passing`."""
    for_peer: bool = False
    """Its fill began because a peer wanted it, and took no slot."""
    used_at: float = 0.0
    eviction_list: EvictionList | None = None
    older: Copy | None = field(default=None, repr=False)
    """The neighbours on the eviction list."""
    younger: Copy | None = field(default=None, repr=False)

    @property
    def usable(self) -> bool:
        """It may be granted now."""
        return self.phase is Phase.RESIDENT and not self.to_evict and not self.tier.lost

    @property
    def pinned(self) -> bool:
        """A pin protects it. Pinned extents beyond a quota are not kept, and are evicted like any others."""
        return self.role is Role.KEPT and self.entry.pinned

    @property
    def idle(self) -> bool:
        """Resident and unused: no lease, no fill from it, no commit under way."""
        return self.phase is Phase.RESIDENT and not self.leases and not self.fills_from and self.committed


@dataclass(slots=True, eq=False)
class CacheEntry:
    """One extent: its copies, its waiters, and the claims and plans that want it."""

    id: ExtentId
    size_bytes: int
    """Its size; of an uneven extent what it takes, or what is reserved for it as long as that is unknown."""
    copies: list[Copy] = field(default_factory=list)
    waiters: list[tuple[ReaderId, int]] = field(default_factory=list)
    datasets: list[DatasetState] = field(default_factory=list)
    needs: int = 0
    """Entered rows of plans that name it."""
    queued: frozenset[int] = frozenset()
    """The jobs that wait for it in the fair queue."""
    ready: bool = False
    """Some copy is usable, as last counted in its datasets."""
    due_at: float | None = None
    """When its fill is retried."""
    attempts: int = 0
    failed: bool = False
    avoid: TierState | None = None
    """The tier whose fill failed last."""
    sourced_at: float = -1.0
    """When the source last gave its bytes, or a reader was sent there; -1 never."""
    owned: bool = True
    """This node owns it, as it does where it is no member of a cluster."""
    unread: bool = False
    """Only jobs of other nodes read it, by what the jobs of this node say."""
    from_peer: bool = False
    """Another node gave the bytes of the fill that brought it to this node."""
    made_from: SourceExtent | None = None
    """The source extent of a prepared extent."""
    most_bytes: int = 0
    """The most that an uneven extent may take; 0 for other extents."""
    elsewhere: Elsewhere = Elsewhere.UNKNOWN
    """Of a prepared extent: whether another node has it."""
    wanted_by: list[CacheEntry] = field(default_factory=list)
    """Prepared extents whose fills wait for this source extent."""

    @property
    def learned_bytes(self) -> int:
        """The size of an uneven extent as far as it is known; 0 for other extents."""
        return self.size_bytes if self.most_bytes else 0

    def best(self) -> Copy | None:
        """The copy to grant; of two, the newer one, which is a promotion into RAM."""
        for copy in reversed(self.copies):
            if copy.usable:
                return copy
        return None

    def home(self, job: int) -> DatasetState | None:
        """The dataset through which a job claims this extent, else the one that claimed it first."""
        if len(self.datasets) > 1:
            return next((dataset for dataset in self.datasets if job in dataset.jobs), self.datasets[0])
        return self.datasets[0] if self.datasets else None

    def filling(self) -> bool:
        """A fill into a tier that works is under way."""
        return any(copy.phase is Phase.FILLING and not copy.tier.lost for copy in self.copies)

    @property
    def in_progress(self) -> bool:
        """A fill is under way, or waited for."""
        return bool(self.waiters) or self.due_at is not None or self.filling()

    @property
    def kept(self) -> bool:
        """Some copy of it is kept."""
        return any(copy.role is Role.KEPT for copy in self.copies)

    @property
    def pinned(self) -> bool:
        """Some dataset that holds it is pinned."""
        return any(dataset.pinned for dataset in self.datasets)


class EvictionList:
    """Copies that may be evicted now, oldest first, and their bytes. Adding at either end and removing cost O(1).

    The list is linked through its copies, so a million of them take no memory here, and it never pauses to grow.
    """

    __slots__ = ("_count", "_oldest", "_youngest", "size_bytes")

    def __init__(self) -> None:
        self._oldest: Copy | None = None
        self._youngest: Copy | None = None
        self._count = 0
        self.size_bytes = 0

    def add(self, copy: Copy, first: bool = False) -> None:
        """Add a copy, which is on no list, as the youngest, or as the first to be evicted."""
        if first:
            self._link(copy, self._oldest)
            self._link(None, copy)
        else:
            self._link(self._youngest, copy)
            self._link(copy, None)
        copy.eviction_list = self
        self._count += 1
        self.size_bytes += copy.entry.size_bytes

    def remove(self, copy: Copy) -> None:
        """Remove a copy, which must be on this list."""
        assert copy.eviction_list is self, "on another list"
        self._link(copy.older, copy.younger)
        copy.older = copy.younger = copy.eviction_list = None
        self._count -= 1
        self.size_bytes -= copy.entry.size_bytes

    def _link(self, older: Copy | None, younger: Copy | None) -> None:
        if older is None:
            self._oldest = younger
        else:
            older.younger = younger
        if younger is None:
            self._youngest = older
        else:
            younger.older = older

    def __iter__(self) -> Iterator[Copy]:
        """The copy just yielded may be removed meanwhile."""
        copy = self._oldest
        while copy is not None:
            following = copy.younger
            yield copy
            copy = following

    def __reversed__(self) -> Iterator[Copy]:
        """The copy just yielded may be removed meanwhile."""
        copy = self._youngest
        while copy is not None:
            following = copy.older
            yield copy
            copy = following

    def __len__(self) -> int:
        return self._count


@dataclass(slots=True, eq=False)
class Ahead:
    """Copies that the plans of one order have fetched ahead, or on the way, and that are not read yet."""

    copies: dict[Copy, None] = field(default_factory=dict)
    """In the order in which their fills began."""
    size_bytes: int = 0

    def add(self, copy: Copy) -> None:
        """Add a copy, which is ahead of no order."""
        copy.ahead_of = self
        self.copies[copy] = None
        self.size_bytes += copy.entry.size_bytes

    def remove(self, copy: Copy) -> None:
        """Remove a copy: it was read, or is no longer needed."""
        copy.ahead_of = None
        del self.copies[copy]
        self.size_bytes -= copy.entry.size_bytes


class DormantExtents:
    """The dormant extents of one tier, and their sizes in bytes."""

    __slots__ = ("_record", "_sizes", "size_bytes")

    def __init__(self) -> None:
        self._sizes: dict[ExtentId, int] = {}
        self._record: Callable[[ExtentId, int], Copy] | None = None
        self.size_bytes = 0

    def add(self, extents: dict[ExtentId, int], record: Callable[[ExtentId, int], Copy]) -> None:
        """Add extents and their sizes in bytes, in the order of eviction. `record(extent, size)` makes the copy of an
        extent that was just removed from here."""
        assert not self._sizes, "added twice"
        self._sizes = dict(reversed(extents.items()))  # removing the last item of a dictionary is cheap
        self._record = record
        self.size_bytes = sum(self._sizes.values())

    def clear(self) -> None:
        """Remove all extents."""
        self._sizes, self.size_bytes = {}, 0

    def take(self, extent: ExtentId) -> int | None:
        """Remove an extent, whose record is made now. Its size in bytes, or None where it is not here."""
        size_bytes = self._sizes.pop(extent, None)
        if size_bytes is not None:
            self.size_bytes -= size_bytes
        return size_bytes

    def records(self) -> Iterator[Copy]:
        """Remove extents and make their copies, in the order of eviction, as the caller iterates."""
        while self._sizes and self._record:
            extent, size_bytes = self._sizes.popitem()
            self.size_bytes -= size_bytes
            yield self._record(extent, size_bytes)

    def get(self, extent: ExtentId) -> int | None:
        """The size in bytes of an extent, or None where it is not here."""
        return self._sizes.get(extent)

    def keys(self) -> KeysView[ExtentId]:
        """The extents, in the reverse order of eviction."""
        return self._sizes.keys()

    def items(self) -> ItemsView[ExtentId, int]:
        """The extents and their sizes in bytes, in the same order."""
        return self._sizes.items()

    def __contains__(self, extent: ExtentId) -> bool:
        return extent in self._sizes

    def __iter__(self) -> Iterator[ExtentId]:
        return iter(self._sizes)

    def __len__(self) -> int:
        return len(self._sizes)


@dataclass(slots=True, eq=False)
class TierState:
    """A tier: its budget, its accounts in bytes, and its eviction lists."""

    name: TierName
    given_bytes: int
    """The budget that the operator or the disk gives."""
    budget_bytes: int
    """`given_bytes`; while the tier is full, the bytes that it held when it became full."""
    full_until: float = 0.0
    """When a tier that took no more bytes is tried again; 0 where it is not full."""
    lost: bool = False
    stalled: bool = False
    """The tier has not answered for seconds, and may be lost soon."""
    corrupt_count: int = 0
    """Copies that failed their checksums."""
    scrubbed_bytes: int = 0
    evicted_bytes: int = 0
    granted_bytes: int = 0
    """Of extents that readers were granted from it."""
    used_bytes: int = 0
    """Filling, resident and evicting."""
    kept_bytes: int = 0
    evicting_bytes: int = 0
    held_bytes: int = 0
    """Mapped by readers from before the daemon's restart."""
    reserve_bytes: int = 0
    """Not for kept copies: the stream window and `unplanned_share_bytes`. Set by the policy."""
    unplanned_share_bytes: int = 0
    """The part of `lru_unplanned` that claims and plans cannot evict. Set by the policy."""
    dormant: DormantExtents = field(default_factory=DormantExtents)
    lru: EvictionList = field(default_factory=EvictionList)
    lru_unplanned: EvictionList = field(default_factory=EvictionList)
    """LRU copies that a reader without a plan used last, where such readers have a share."""
    passing: EvictionList = field(default_factory=EvictionList)
    """Copies that no dataset declared and that came last, until there are `PASSED_SHARE` of them."""
    ahead: EvictionList = field(default_factory=EvictionList)
    """Filled for a plan and not yet read, in the order of need."""
    in_use: EvictionList = field(default_factory=EvictionList)
    """Read, and needed again by a plan; the least recently used first."""

    @property
    def full(self) -> bool:
        """The tier took no more bytes a short time ago."""
        return self.full_until > 0.0

    @property
    def takes_nothing(self) -> bool:
        """The tier is full, or files of others take all the room on its disk."""
        return self.full or not self.given_bytes

    kept: dict[DatasetId, EvictionList] = field(default_factory=dict)
    committing: set[Copy] = field(default_factory=set)

    @property
    def free_bytes(self) -> int:
        """Bytes that can be reserved now; negative where used and held bytes exceed the budget."""
        return self.budget_bytes - self.held_bytes - self.used_bytes

    @property
    def keep_bytes(self) -> int:
        """Bytes that kept copies may take."""
        return max(0, self.budget_bytes - self.held_bytes - self.reserve_bytes)

    @property
    def unused_bytes(self) -> int:
        """Bytes of `unused`."""
        return self.dormant.size_bytes + self.lru.size_bytes + self.unplanned_bytes

    @property
    def unplanned_bytes(self) -> int:
        """Idle bytes that readers without a plan used last, where these have a share; objects that no dataset declares are
        among them."""
        return self.lru_unplanned.size_bytes + self.passing.size_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of `spare`, to within one extent."""
        return self.unused_bytes - min(self.unplanned_bytes, self.unplanned_share_bytes)

    def lru_of(self, copy: Copy) -> EvictionList:
        """The list of an LRU copy."""
        return self.lru_unplanned if copy.unplanned and self.unplanned_share_bytes else self.lru

    def unused(self) -> Iterator[Copy]:
        """Idle copies that no claim keeps and no plan needs: the least recently used first, and last those that readers
        without a plan used."""
        activated = 0
        for copy in self.dormant.records():
            activated += 1
            yield copy
        yield from islice(self.lru, activated, None)  # the copies just activated are at the front
        yield from self.lru_unplanned
        yield from self.passing

    def spare(self) -> Iterator[Copy]:
        """The copies that claims and plans may evict: `unused` without the share of readers that have no plan."""
        left = self.spare_bytes
        for copy in self.unused() if left else ():
            yield copy
            left -= copy.entry.size_bytes
            if left <= 0:
                return
