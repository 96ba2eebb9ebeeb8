"""A claimed dataset: which jobs claim it, how much of it is resident, and how its epochs went."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from cachesvc.core.model import Counted, DatasetId, ExtentId, SourceExtent

SMALL_SAMPLE_BYTES = 16 << 10
"""A read of a file takes some 8 us beside the copy of its bytes. Below this size that is more than the copy into RAM."""
MAX_EPOCHS = 16
"""Epochs of a dataset that are remembered: a report is about now."""


@dataclass(slots=True)
class DemandCounts:
    """Counts of a dataset's demands and fills since it was first declared."""

    hits: int = 0
    ahead: int = 0
    misses: int = 0
    refused: int = 0
    source_bytes: int = 0

    def count(self, grant: Counted, by: int = 1) -> None:
        """Count one grant more, or one less."""
        if grant == "hits":
            self.hits += by
        elif grant == "ahead":
            self.ahead += by
        else:
            self.misses += by


@dataclass(slots=True, eq=False)
class EpochTally:
    """One epoch of a dataset, counted as its plans pass it. `number` counts from 0 since the dataset was first declared."""

    number: int
    bound: float
    launch: int
    """The job whose epoch it is."""
    began_at: float
    """When the first of its plans began: an extent that comes from the source later is no hit of any of them."""
    plans: set[int] = field(default_factory=set)
    running: set[int] = field(default_factory=set)
    """The plans that have not ended."""
    broken: dict[int, int] = field(default_factory=dict)
    """Plans that ended before their last row, by fingerprint: the step that each had passed."""
    touched: int = 0
    hits: int = 0
    """Touched extents that cost the source nothing in that epoch."""


@dataclass(slots=True, eq=False)
class DatasetState:
    """A claimed dataset: its claims, quotas, prefetch and resident extents."""

    id: DatasetId
    extents: tuple[tuple[ExtentId, int], ...]
    counts: DemandCounts
    sample_bytes: int = 0
    """The mean size of a sample; 0 where it is unknown."""
    made_from: dict[ExtentId, SourceExtent] = field(default_factory=dict)
    """The source extents of a prepared dataset."""
    largest_source_bytes: int = 0
    """The largest of them."""
    uneven: bool = False
    """Its extents have the sizes that their fills report."""
    size_bytes: int = 0
    largest_bytes: dict[int, int] = field(default_factory=dict)
    """The largest extent of each size class, eight classes to a power of two: the largest of all may fit no tier."""
    jobs: set[int] = field(default_factory=set)
    local: dict[int, frozenset[ExtentId]] = field(default_factory=dict)
    """The extents that jobs of this node read in all their epochs, while those of other nodes read others: by job."""
    pinned: bool = False
    kept_bytes: int = 0
    ready_count: int = 0
    ready_bytes: int = 0
    failed: dict[ExtentId, tuple[int, str]] = field(default_factory=dict)
    stuck: dict[ExtentId, int] = field(default_factory=dict)
    """Extents that a prefetch found no room to keep, and their sizes in bytes."""
    prefetched: bool = False
    """A job wants all of it: extents that a lost tier or corruption takes are filled again."""
    prefetchers: set[int] = field(default_factory=set)
    """The jobs that want all of it."""
    prefetch_at: int = 0
    """The index of the next extent that the prefetch looks at."""
    prefetch_fill: int = 0
    """The number of the last fill that this prefetch started, counted over all prefetches, which are served round
    robin."""
    user: int = -1
    """The user who pinned it, else the first to claim it; kept bytes count against this user's quota."""
    quota_bytes: int | None = None
    user_quota_bytes: int | None = None
    unpinned: tuple[int, int | None, int | None] | None = None
    """While it is pinned: the user and the quotas of the first claim."""
    epochs: deque[EpochTally] = field(default_factory=lambda: deque(maxlen=MAX_EPOCHS))

    @property
    def small_samples(self) -> bool:
        """Its samples are read faster from RAM than from a file, the copy into RAM included."""
        return 0 < self.sample_bytes <= SMALL_SAMPLE_BYTES

    @property
    def claimed(self) -> bool:
        """A job or a pin claims it; otherwise the end of its claim is under way."""
        return bool(self.jobs) or self.pinned

    @property
    def done(self) -> bool:
        """A prefetch has nothing left to do: every extent is resident, failed or known not to fit."""
        return self.ready_count + len(self.failed) + len(self.stuck) >= len(self.extents)

    @property
    def limited(self) -> bool:
        """A quota limits how much of it is kept."""
        return self.quota_bytes is not None or self.user_quota_bytes is not None

    @property
    def exempt(self) -> bool:
        """The pin of a user without quotas keeps all of it."""
        return self.pinned and not self.limited

    def pin(self, user: int, quota_bytes: int | None, user_quota_bytes: int | None) -> None:
        """Count it for the user who pins it, until `unpin`."""
        self.unpinned = self.unpinned or (self.user, self.quota_bytes, self.user_quota_bytes)
        self.pinned, self.user = True, user
        self.quota_bytes, self.user_quota_bytes = quota_bytes, user_quota_bytes

    def requote(self, quota_bytes: int | None, of_users: Mapping[int, int | None]) -> None:
        """Set other quotas. A pin of no user has none."""
        if self.unpinned is not None:
            user, _, _ = self.unpinned
            self.unpinned = (user, quota_bytes, of_users.get(user))
        if not (self.pinned and self.user < 0):
            self.quota_bytes, self.user_quota_bytes = quota_bytes, of_users.get(self.user)

    def unpin(self) -> None:
        """Count it for the user of the first claim again."""
        assert self.unpinned is not None, "unpin without a pin"
        self.user, self.quota_bytes, self.user_quota_bytes = self.unpinned
        self.pinned, self.unpinned = False, None

    def join(self, size_bytes: int, ready: bool) -> None:
        """Count an extent as one of its own."""
        self.size_bytes += size_bytes
        length = size_bytes.bit_length()
        size_class = length << 3 | (size_bytes << 3 >> max(0, length - 1)) & 7
        self.largest_bytes[size_class] = max(self.largest_bytes.get(size_class, 0), size_bytes)
        self.count_ready(size_bytes, int(ready))

    def leave(self, size_bytes: int, ready: bool) -> None:
        """Stop counting an extent as one of its own."""
        self.size_bytes -= size_bytes
        self.count_ready(size_bytes, -ready)

    def resize(self, by: int, ready: bool) -> None:
        """Count an extent of its own with `by` bytes more."""
        self.size_bytes += by
        self.ready_bytes += by * ready

    def set_local(self, job: int, extents: frozenset[ExtentId]) -> bool:
        """Set the extents that a job reads in all its epochs; none where it says nothing. Return whether they changed."""
        if self.local.get(job, frozenset()) == extents:
            return False
        self.local.pop(job, None)
        if extents:
            self.local[job] = extents
        return True

    def reads(self, extent: ExtentId) -> bool:
        """Return whether one of these jobs reads an extent."""
        return any(extent in extents for extents in self.local.values())

    def count_ready(self, size_bytes: int, by: int) -> None:
        """Count one of its extents as resident (1), or no longer (-1)."""
        self.ready_count += by
        self.ready_bytes += by * size_bytes

    def fail(self, extent: ExtentId, code: int, message: str) -> None:
        """Record why an extent is not resident."""
        self.failed[extent] = (code, message)
        self.stuck.pop(extent, None)
