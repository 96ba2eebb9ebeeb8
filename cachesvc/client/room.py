"""Waits until the daemon has room for extents: it does not announce free room."""

from __future__ import annotations

import logging
from collections.abc import Callable

from cachesvc.core.errors import OutOfSpace
from cachesvc.core.limits import ROOM_PAUSE_S, ROOM_S
from cachesvc.system.deadline import Deadline

WARN_AFTER_S = 5.0
_log = logging.getLogger("cachesvc")


class RoomWait:
    """The waits of one reader. The first long one is logged."""

    def __init__(self, timeout_s: float, warn_after_s: float = WARN_AFTER_S) -> None:
        """A wait ends after `ROOM_S`, or `timeout_s` where that is less."""
        self._wait_s, self._warn_after_s = min(timeout_s, ROOM_S), warn_after_s
        self._warned = False

    def until(self, leased: Callable[[], bool], lacking: str) -> None:
        """Call `leased` until it returns true. Raises OutOfSpace, which says `lacking`, and what `leased` raises."""
        deadline = Deadline(self._wait_s)
        while not leased():
            if not deadline.pause(ROOM_PAUSE_S):
                raise OutOfSpace(lacking)
            if deadline.waited_s >= self._warn_after_s and not self._warned:
                self._warned = True
                _log.warning(
                    "the daemon has no room: waiting up to %.0f s for it; see cachesvc status", self._wait_s
                )
