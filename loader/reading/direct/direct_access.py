"""Direct reads: this process compiles the catalog and fills the extents itself, with its own credentials."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachesvc.catalog.catalog import Catalog
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.own_home import own_home
from cachesvc.client.protocol import Grants
from cachesvc.config_files import own_sections
from cachesvc.core.model import Extent
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.records.dataset_state import SMALL_SAMPLE_BYTES
from cachesvc.core.stalls import StallReport
from cachesvc.sources.fetch import Fetcher, encode_missing
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.system.fill_target import OnBytes
from loader.reading.direct.direct_grants import DIRECT_BYTES, DirectGrants
from loader.reading.direct.shared_rate import direct_rate
from loader.reading.thrash_warning import working_set_bytes

DIRECT_THREADS = 8
"""Connections of one fill, of the few that a process runs at once; the fillers of a daemon use more."""
_LEAST_PART = 0.5
"""Each process copies all that it reads of: with many processes, copies would take more memory than the data."""


@dataclass(frozen=True, slots=True)
class Access:
    """The extents of one dataset for one process, and what it reports to their holder.

    `submit` sends the plan by which extents will be needed, and the part of their samples that this process reads,
    `report` the waits of steps, `suspect` extents that were granted corrupt. `recalled` returns the extents that the holder
    recalls, and whether each is corrupt. `connect_another` makes a connection for the plan of an order that runs at the
    same time. Without a daemon there are no metrics, nothing is cached in files, and no room is shared."""

    grants: Grants
    submit: Callable[[Plan, float], None]
    report: Callable[[StallReport], None] = lambda _: None
    suspect: Callable[[Sequence[int]], None] = lambda _: None
    recalled: Callable[[], Mapping[int, bool]] = dict
    connect_another: Callable[[], DaemonGrants] | None = None


def direct_access(catalog: Catalog) -> Access:
    """Grants local files themselves or copies of them, and fills all other extents into this process's memory, in the
    order of the plan."""
    home = own_home()
    settings = SourceSettings(metadata_directory=Path(home) / "metadata", sections=own_sections())
    sources, own = Sources(settings), threading.local()

    def fill(extent: Extent, fd: int, passing: OnBytes) -> str:
        if not hasattr(own, "fetcher"):
            own.fetcher = Fetcher(sources, DIRECT_THREADS)  # a fetcher serves one thread
        return encode_missing(own.fetcher.fetch(extent, fd, passing))

    grants = DirectGrants(catalog.extent, fill, direct_rate(home).take)

    def submit(plan: Plan, part: float) -> None:
        grants.follow(plan.extent.tolist(), copy_budget(catalog, plan, part))

    return Access(grants, submit)


def copy_budget(catalog: Catalog, plan: Plan, part: float, most: int = DIRECT_BYTES) -> int:
    """Return the bytes of memory for copies of the plan's local files, 0 where these are to be read in place. A small
    sample costs more when it is read from its file than its share of a copy of the whole extent.

    `part`: of the samples in these extents, the part that this process reads. The budget holds what the plan reads side by
    side, and as much again, which is copied meanwhile; where that is above `most`, nothing is copied.
    """
    mean_bytes = int(catalog.extent_sizes.sum()) / max(1, catalog.samples)
    if part < _LEAST_PART or mean_bytes > part * SMALL_SAMPLE_BYTES:
        return 0
    budget = 2 * working_set_bytes(plan, catalog.extent_sizes)
    return budget if budget <= most else 0
