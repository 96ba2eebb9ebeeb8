"""A tier's budget, and where its bytes go."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from cachesvc.core.model import DatasetId, TierName
from cachesvc.core.records.dormant import DormantExtents
from cachesvc.core.records.eviction_list import EvictionList

if TYPE_CHECKING:
    from cachesvc.core.records.cache_entry import Copy


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
    ahead: EvictionList = field(default_factory=EvictionList)
    """Filled for a plan and not yet read, in the order of need."""
    in_use: EvictionList = field(default_factory=EvictionList)
    """Read, and needed again by a plan; the least recently used first."""
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
        return self.dormant.size_bytes + self.lru.size_bytes + self.lru_unplanned.size_bytes

    @property
    def spare_bytes(self) -> int:
        """Bytes of `spare`, to within one extent."""
        return self.unused_bytes - min(self.lru_unplanned.size_bytes, self.unplanned_share_bytes)

    def unused(self) -> Iterator[Copy]:
        """Idle copies that no claim keeps and no plan needs: the least recently used first, and last those that readers
        without a plan used."""
        activated = 0
        for copy in self.dormant.records():
            activated += 1
            yield copy
        yield from islice(self.lru, activated, None)  # the copies just activated are at the front
        yield from self.lru_unplanned

    def spare(self) -> Iterator[Copy]:
        """The copies that claims and plans may evict: `unused` without the share of readers that have no plan."""
        left = self.spare_bytes
        for copy in self.unused() if left else ():
            yield copy
            left -= copy.entry.size_bytes
            if left <= 0:
                return
