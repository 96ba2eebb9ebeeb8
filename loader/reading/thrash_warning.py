"""Warns of an order that needs more at once than the daemon's cache holds: each extent is then fetched again and again.
An extent that no tier can hold is an error."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.order.epoch_order import Plan
from loader.reading.active_reads import Ints

_log = logging.getLogger("cachesvc")


def working_set_bytes(plan: Plan, extent_sizes: Ints) -> int:
    """The most bytes that any one step of the plan needs."""
    sizes = extent_sizes[plan.extent]
    steps = np.concatenate((plan.first_step, plan.last_step + 1))
    changes = np.concatenate((sizes, -sizes))
    return int(np.cumsum(changes[np.lexsort((changes, steps))]).max(initial=0))


def check_extents_fit(catalog: Catalog, tier_budgets: Sequence[int]) -> None:
    """Raise OutOfSpace, naming the object, for an extent larger than every tier: it is decoded from a whole object, and
    would be waited for in vain."""
    largest = int(np.argmax(catalog.extent_sizes))
    size = int(catalog.extent_sizes[largest])
    if tier_budgets and size > max(tier_budgets):
        uri, most = catalog.extent(largest).pieces[0].object.uri, _size_text(max(tier_budgets))
        raise OutOfSpace(
            f"{uri} is cached as one extent of {_size_text(size)}, and the largest tier of the daemon holds {most}: give "
            "the daemon more --ram or --nvme, or allow direct reads with CACHESVC=auto"
        )


class ThrashWarning:
    """Checks the plans of one dataset until it has warned once."""

    def __init__(self, extent_sizes: Ints) -> None:
        self._sizes, self._warned = extent_sizes, False

    def check(self, plan: Plan, tier_budgets: Sequence[int]) -> None:
        """Warn if the plan's working set exceeds the largest tier: an extent that is needed twice stays in one tier.
        `tier_budgets`: bytes that each tier of the daemon may hold."""
        if self._warned or not tier_budgets or int(self._sizes.sum()) <= sum(tier_budgets):
            return
        needed = working_set_bytes(plan, self._sizes)
        if needed > max(tier_budgets):
            self._warned = True
            _log.warning(
                "%s are shuffled together, and the largest tier of the daemon holds %s: extents will be fetched from the"
                " source again and again. Give the DataLoader a smaller window=, or the daemon more --ram or --nvme",
                _size_text(needed),
                _size_text(max(tier_budgets)),
            )


def _size_text(size_bytes: int) -> str:
    """A size in MiB, or in KiB where whole MiB would be too inexact."""
    if size_bytes < 16 << 20 and size_bytes % (1 << 20):
        return f"{-(-size_bytes // 1024):,} KiB"
    return f"{size_bytes / (1 << 20):,.0f} MiB"
