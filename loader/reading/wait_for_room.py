"""The daemon had no room for what one sample needs, and there is no way around it: wait until it has."""

from __future__ import annotations

import logging
import time

from cachesvc.core.errors import OutOfSpace
from loader.reading.lease_table import Leases, Use

PAUSE_S = 0.02
"""Nobody tells when there is room: other readers give it back after each of their reads."""
WAIT_S = 120.0
"""Room that did not come in this time is not there. Other readers' reads take milliseconds, but a RAM tier that gave way to
trainers takes its memory back a minute after they let go of it."""
TOLD_S = 5.0
"""Whoever waits so long is told."""
_log = logging.getLogger("cachesvc")


def wait_for_room(leases: Leases, use: Use, needed: list[int], timeout_s: float) -> None:
    """Lease the extents of one sample. Raises OutOfSpace after `WAIT_S`, or `timeout_s` where that is less."""
    wait_s, began, told = min(timeout_s, WAIT_S), time.monotonic(), False
    while not leases.ensure(use, needed):
        waited_s = time.monotonic() - began
        if waited_s >= wait_s:
            raise OutOfSpace(
                f"no room for the {len(needed)} extents of one sample, and reading directly is off; give the "
                "daemon more --ram or --nvme, or allow direct reads with CACHESVC=auto"
            )
        if waited_s >= TOLD_S and not told:
            told = True
            _log.warning("the daemon has no room: waiting up to %.0f s for it; see cachesvc status", wait_s)
        time.sleep(PAUSE_S)
