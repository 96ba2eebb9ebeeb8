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


class RoomWait:
    """The waits of one reader. The first long one is logged."""

    def __init__(self, leases: Leases, timeout_s: float, warn_after_s: float = WARN_AFTER_S) -> None:
        """A wait ends after `WAIT_S`, or `timeout_s` where that is less."""
        self._leases, self._wait_s, self._warn_after_s = leases, min(timeout_s, WAIT_S), warn_after_s
        self._warned = False

    def lease(self, read: ActiveRead, needed: list[int]) -> None:
        """Lease the extents of one sample. Raises OutOfSpace."""
        began = time.monotonic()
        while not self._leases.ensure(read, needed):
            waited_s = time.monotonic() - began
            if waited_s >= self._wait_s:
                raise OutOfSpace(
                    f"no room for the {len(needed)} extents of one sample, and reading directly is off; give the "
                    "daemon more --ram or --nvme, or allow direct reads with CACHESVC=auto"
                )
            if waited_s >= self._warn_after_s and not self._warned:
                self._warned = True
                _log.warning(
                    "the daemon has no room: waiting up to %.0f s for it; see cachesvc status", self._wait_s
                )
            time.sleep(PAUSE_S)
