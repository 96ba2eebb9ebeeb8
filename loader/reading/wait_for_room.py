"""Waits until the daemon has room for the extents of one sample, where direct reads are not possible."""

from __future__ import annotations

import logging
import time

from cachesvc.core.errors import OutOfSpace
from loader.reading.active_reads import ActiveRead
from loader.reading.lease_table import Leases

PAUSE_S = 0.02
"""The daemon does not announce free room: other readers release extents after each of their reads."""
WAIT_S = 120.0
"""A timeout. Other readers' reads take milliseconds, but a RAM tier that shrank for the trainers' memory grows again a
minute after they released it."""
WARN_AFTER_S = 5.0
_log = logging.getLogger("cachesvc")


def wait_for_room(leases: Leases, read: ActiveRead, needed: list[int], timeout_s: float) -> None:
    """Lease the extents of one sample. Raises OutOfSpace after `WAIT_S`, or `timeout_s` where that is less."""
    wait_s, began, warned = min(timeout_s, WAIT_S), time.monotonic(), False
    while not leases.ensure(read, needed):
        waited_s = time.monotonic() - began
        if waited_s >= wait_s:
            raise OutOfSpace(
                f"no room for the {len(needed)} extents of one sample, and reading directly is off; give the "
                "daemon more --ram or --nvme, or allow direct reads with CACHESVC=auto"
            )
        if waited_s >= WARN_AFTER_S and not warned:
            warned = True
            _log.warning("the daemon has no room: waiting up to %.0f s for it; see cachesvc status", wait_s)
        time.sleep(PAUSE_S)
