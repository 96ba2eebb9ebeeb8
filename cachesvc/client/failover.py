"""Reads directly from the source while the daemon is gone, or waits for it, and returns to it once it is back. Waits
until the daemon has room for extents: it does not announce free room."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

from cachesvc.client.protocol import Granted, Grants, Refused
from cachesvc.core.errors import DaemonUnavailable, DeadlineExceeded, NotAllowed, OutOfSpace
from cachesvc.core.limits import PROBE_CAP_S, PROBE_FIRST_S, ROOM_PAUSE_S, ROOM_S
from cachesvc.system.deadline import Deadline

_log = logging.getLogger("cachesvc")


class FailoverGrants:
    """Acquires from `primary`; from `fallback` while the primary is unavailable, and for extents that it refuses.

    Without a fallback, or when the fallback has no credentials, waits for the primary up to the deadline of the call.
    The first use of the fallback is logged for each of the two causes.
    """

    def __init__(
        self, primary: Grants, fallback: Grants | None, upgrading: Callable[[], bool] = lambda: False
    ) -> None:
        """`upgrading` tells whether the primary will be back in a moment: then there is no fallback."""
        self._primary, self._fallback, self._upgrading = primary, fallback, upgrading
        self.passed = primary.passed
        self._lock = threading.Lock()
        self._from_fallback: dict[int, int] = {}
        """Leases by extent."""
        self._probe_at = 0.0
        self._pause_s = PROBE_FIRST_S
        self._gone: DaemonUnavailable | None = None
        """Why the primary was unavailable the last time."""
        self._told: set[bool] = set()

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`. Raises DaemonUnavailable when the deadline passes without a daemon."""
        deadline = time.monotonic() + timeout_s
        answers, waiting = self._acquire_primary(extents, timeout_s), False
        while answers is None and self._upgrading() and time.monotonic() < deadline:
            time.sleep(self._pause_s)
            self._probe_at = 0.0
            answers = self._acquire_primary(extents, max(0.0, deadline - time.monotonic()))
        while answers is None:
            why = f"the daemon does not serve ({self._gone})"
            direct = self._acquire_fallback(extents, deadline - time.monotonic(), why, is_gone=True)
            if direct is not None:
                return direct
            if self._gone is not None and self._gone.for_good:
                raise self._gone
            if not waiting:
                waiting = True
                _log.warning("%s: waiting up to %.0f s for it", why, timeout_s)
            pause = min(self._pause_s, deadline - time.monotonic())
            if pause <= 0:
                raise DaemonUnavailable(f"no daemon for {timeout_s:.0f} s and no direct reads: {self._gone}")
            time.sleep(pause)  # a daemon that starts does not announce itself
            with suppress(DeadlineExceeded):  # the next round says why there was none before
                answers = self._acquire_primary(extents, max(0.0, deadline - time.monotonic()))
        refused = [answer.extent for answer in answers if isinstance(answer, Refused)]
        if not refused:
            return answers
        granted: list[Granted | Refused] = [answer for answer in answers if isinstance(answer, Granted)]
        why = "the daemon has no room"
        direct = self._acquire_fallback(refused, deadline - time.monotonic(), why, is_gone=False)
        return granted + direct if direct is not None else answers

    def release(self, extents: Sequence[int]) -> None:
        """See `Grants`; each lease is released where it was granted."""
        with self._lock:
            from_fallback = [extent for extent in extents if extent in self._from_fallback]
            for extent in from_fallback:
                self._from_fallback[extent] -= 1
                if not self._from_fallback[extent]:
                    del self._from_fallback[extent]
        if from_fallback and self._fallback is not None:
            self._fallback.release(from_fallback)
        self._primary.release([extent for extent in extents if extent not in set(from_fallback)])

    def close(self) -> None:
        """See `Grants`."""
        self._primary.close()
        if self._fallback is not None:
            self._fallback.close()
        with self._lock:
            self._from_fallback.clear()

    def _acquire_primary(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused] | None:
        """Acquire from the primary. Returns None while it is unavailable; it is probed after a pause, which doubles up to
        `PROBE_CAP_S`."""
        if self._fallback is not None and time.monotonic() < self._probe_at:
            return None
        try:
            answers = self._primary.acquire(extents, timeout_s)
        except DaemonUnavailable as error:
            self._gone = error
            self._pause_s = min(self._pause_s * 2, PROBE_CAP_S)
            self._probe_at = time.monotonic() + self._pause_s
            return None
        self._pause_s = PROBE_FIRST_S
        return answers

    def _acquire_fallback(
        self, extents: Sequence[int], timeout_s: float, why: str, is_gone: bool
    ) -> list[Granted | Refused] | None:
        """Acquire from the fallback. Returns None without one that can deliver in time."""
        fallback = self._fallback  # another thread may find meanwhile that it has no credentials
        if fallback is None:
            return None
        try:
            answers = fallback.acquire(extents, max(0.0, timeout_s))
        except NotAllowed as refusal:
            _log.warning("%s, and reading directly is not possible: %s", why, refusal)
            self._fallback = None
            return None
        except DeadlineExceeded:
            return None
        with self._lock:
            if is_gone not in self._told:
                self._told.add(is_gone)
                until = "it is back" if is_gone else "it has room"
                _log.warning("%s: reading directly from the source until %s", why, until)
            for answer in answers:
                if isinstance(answer, Granted):
                    self._from_fallback[answer.extent] = self._from_fallback.get(answer.extent, 0) + 1
        return answers


WARN_AFTER_S = 5.0


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
