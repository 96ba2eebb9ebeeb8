"""One extent as this node knows it, and its copies in tiers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from cachesvc.core.model import ExtentId, ReaderId
from cachesvc.core.records.copy_phases import Phase

if TYPE_CHECKING:
    from cachesvc.core.records.dataset_state import DatasetState
    from cachesvc.core.records.eviction_list import EvictionList
    from cachesvc.core.records.order_window import OrderWindow
    from cachesvc.core.records.tier_state import TierState


class Role(Enum):
    """The reason why a copy is in its tier: a claim keeps it, a plan needs it, or it was used recently."""

    KEPT = 1
    AHEAD = 2
    LRU = 3


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
    """The copy that this one is being filled from; None where that is the source."""
    leases: int = 0
    fills_from: int = 0
    """Fills under way that read this copy."""
    committed: bool = True
    doomed: bool = False
    """Never granted again; evicted as soon as it is idle."""
    recalled: bool = False
    """Its room is needed: granted for one read only, and evicted as soon as it is idle."""
    ahead_of: OrderWindow | None = None
    """The window that look-ahead filled it for, until its first read: that read is no hit."""
    touched: bool = False
    unplanned: bool = False
    """A reader without a plan used it last."""
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
        return self.phase is Phase.RESIDENT and not self.doomed and not self.tier.lost

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
    from_peer: bool = False
    """Another node gave the bytes of the fill that brought it to this node."""

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
