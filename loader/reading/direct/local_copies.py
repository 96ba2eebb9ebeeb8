"""Decides whether extents of local files are copied into this process's memory before their samples are read.

A small sample costs more when it is read from its file than its share of a copy of the whole extent.
"""

from __future__ import annotations

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.records.dataset_state import SMALL_SAMPLE_BYTES
from loader.reading.direct.direct_fills import DIRECT_BYTES
from loader.reading.thrash_warning import working_set_bytes

_LEAST_PART = 0.5
"""Each process copies all that it reads of: with many processes, copies would take more memory than the data."""


def copy_budget(catalog: Catalog, plan: Plan, part: float) -> int:
    """Return the bytes of memory for copies of the plan's extents, 0 where they are to be read in place.

    `part`: of the samples in these extents, the part that this process reads. The budget holds what the plan reads side by
    side, and as much again, which is copied meanwhile.
    """
    mean_bytes = int(catalog.extent_sizes.sum()) / max(1, catalog.samples)
    if part < _LEAST_PART or mean_bytes > part * SMALL_SAMPLE_BYTES:
        return 0
    budget = 2 * working_set_bytes(plan, catalog.extent_sizes)
    return budget if budget <= DIRECT_BYTES else 0
