"""Reports of a node about its datasets and readers: frozen snapshots."""

from __future__ import annotations

from dataclasses import dataclass

from cachesvc.core.model import DatasetId, ExtentId


@dataclass(frozen=True, slots=True)
class PrefetchProgress:
    """Progress of a job's datasets: how much is resident.

    `failed` maps an extent to the code (errors.py) and message of its last fill. `stuck` counts what a prefetch cannot
    keep. `incomplete` maps a resident extent in which objects are missing to the code and message of the first one.
    """

    resident_extents: int
    resident_bytes: int
    total_extents: int
    total_bytes: int
    failed: dict[ExtentId, tuple[int, str]]
    stuck_extents: int
    stuck_bytes: int
    incomplete: dict[ExtentId, tuple[int, str]]

    @property
    def finished(self) -> bool:
        """Every extent is resident, failed or known not to fit: a prefetch has nothing left to do."""
        return self.resident_extents + len(self.failed) + self.stuck_extents >= self.total_extents


@dataclass(frozen=True, slots=True)
class EpochCounters:
    """An epoch of a dataset, as far as its plans have passed it; `number` counts since the dataset was first declared.

    A hit is an extent that the epoch touched, and that cost the source nothing since the epoch began.
    """

    number: int
    touched: int
    hits: int
    bound: float

    @property
    def hit_rate(self) -> float:
        """Hits as a part of touched extents; 0 before the first."""
        return self.hits / self.touched if self.touched else 0.0

    @property
    def of_bound(self) -> float:
        """The hit rate as a part of the best possible one."""
        return self.hit_rate / self.bound if self.bound else 0.0


@dataclass(frozen=True, slots=True)
class Counters:
    """A dataset's demands and fills.

    `hits`: the extent was resident. `ahead`: it was resident, and this was its first read after look-ahead filled it.
    `misses`: the reader had to wait. `refused`: it was read elsewhere. `bound` is the best possible hit rate, 0 while no
    job claims the dataset.
    """

    dataset: DatasetId
    hits: int
    ahead: int
    misses: int
    refused: int
    source_bytes: int
    kept_bytes: int
    resident_bytes: int
    total_bytes: int
    bound: float
    epochs: tuple[EpochCounters, ...] = ()
    """The latest epochs, oldest first, of a dataset for which jobs submit plans."""

    @property
    def hit_rate(self) -> float:
        """Hits as a part of all demands; 0 before the first."""
        total = self.hits + self.ahead + self.misses + self.refused
        return self.hits / total if total else 0.0


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """A reader at one moment.

    `filling`, `retried` and `queued` list the extents that it waits for: a fill is under way, the last fill failed and is
    tried again, a slot or room is missing. `waiting_since` is the time from which some extent was missing at any time. The
    reader has consumed everything before `step` of the `steps` of its plan; both are 0 without one.
    """

    leased_extents: int = 0
    filling: tuple[ExtentId, ...] = ()
    retried: tuple[ExtentId, ...] = ()
    queued: tuple[ExtentId, ...] = ()
    waiting_since: float = 0.0
    step: int = 0
    steps: int = 0
