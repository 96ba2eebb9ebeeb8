"""Says where an order needs more at once than the daemon's cache holds: each extent is then fetched again and again."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from cachesvc.core.order.epoch_order import Plan
from loader.reading.reader import Ints

_log = logging.getLogger("cachesvc")


def at_once_bytes(plan: Plan, extent_sizes: Ints) -> int:
    """The most that is needed at one step."""
    sizes = extent_sizes[plan.extent]
    steps = np.concatenate((plan.first_step, plan.last_step + 1))
    changes = np.concatenate((sizes, -sizes))
    return int(np.cumsum(changes[np.lexsort((changes, steps))]).max(initial=0))


class ThrashWarning:
    """Looks at the plans of one dataset until it has said so."""

    def __init__(self, extent_sizes: Ints) -> None:
        self._sizes, self._said = extent_sizes, False

    def look(self, plan: Plan, rooms: Sequence[int]) -> None:
        """`rooms`: bytes that each tier of the daemon may hold; an extent that is needed twice stays in one of them."""
        if self._said or not rooms or int(self._sizes.sum()) <= sum(rooms):
            return
        needed = at_once_bytes(plan, self._sizes)
        if needed > max(rooms):
            self._said = True
            _log.warning(
                "%s are shuffled together, and the largest tier of the daemon holds %s: extents will be fetched from the"
                " source again and again. Give the DataLoader a smaller window=, or the daemon more --ram or --nvme",
                _told(needed),
                _told(max(rooms)),
            )


def _told(size_bytes: int) -> str:
    """In KiB where MiB would say less than is true."""
    if size_bytes < 16 << 20 and size_bytes % (1 << 20):
        return f"{-(-size_bytes // 1024):,} KiB"
    return f"{size_bytes / (1 << 20):,.0f} MiB"
