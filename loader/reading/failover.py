"""The daemon may die: reads go around it, or wait for it, and come back by themselves. Design D10."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from cachesvc.client.protocol import Granted, Grants, Refused
from cachesvc.core.errors import DaemonUnavailable, DeadlineExceeded, NotAllowed

FIRST_PROBE_S = 0.1
LAST_PROBE_S = 1.0
"""Knocking is cheap (a connect that fails), and a restarted daemon should be used soon."""
_log = logging.getLogger("cachesvc")


class FailoverGrants:
    """Asks `first`; while that is unavailable, or for extents it refuses, asks `second`.

    Without a second, or when the second has no credentials, waits for the first up to the deadline of the call.
    `around_bytes` counts what was read around the first; the first time is logged.
    """

    def __init__(self, first: Grants, second: Grants | None) -> None:
        self._first, self._second = first, second
        self._lock = threading.Lock()
        self._around: dict[int, int] = {}
        self._knock_at = 0.0
        self._pause_s = FIRST_PROBE_S
        self._gone = ""
        self.around_bytes = 0

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See Grants. Raises DaemonUnavailable when the deadline passes without a daemon."""
        deadline = time.monotonic() + timeout_s
        answers, waiting = self._ask_first(extents, timeout_s), False
        while answers is None:
            around = self._ask_second(
                extents, deadline - time.monotonic(), f"the daemon is gone ({self._gone})"
            )
            if around is not None:
                return around
            if not waiting:
                waiting = True
                _log.warning("the daemon is gone (%s): waiting up to %.0f s for it", self._gone, timeout_s)
            pause = min(self._pause_s, deadline - time.monotonic())
            if pause <= 0:
                raise DaemonUnavailable(f"no daemon for {timeout_s:.0f} s and no way around it: {self._gone}")
            time.sleep(pause)  # nobody can tell us when a daemon starts; this paces the knocking
            answers = self._ask_first(extents, max(0.0, deadline - time.monotonic()))
        refused = [answer.extent for answer in answers if isinstance(answer, Refused)]
        if not refused:
            return answers
        granted: list[Granted | Refused] = [answer for answer in answers if isinstance(answer, Granted)]
        around = self._ask_second(refused, deadline - time.monotonic(), "the daemon has no room")
        return granted + around if around is not None else answers

    def release(self, extents: Sequence[int]) -> None:
        """See Grants; each lease goes back to where it came from."""
        with self._lock:
            theirs = [extent for extent in extents if extent in self._around]
            for extent in theirs:
                self._around[extent] -= 1
                if not self._around[extent]:
                    del self._around[extent]
        if theirs and self._second is not None:
            self._second.release(theirs)
        self._first.release([extent for extent in extents if extent not in set(theirs)])

    def passed(self, step: int) -> None:
        """See Grants."""
        self._first.passed(step)

    def close(self) -> None:
        """See Grants."""
        self._first.close()
        if self._second is not None:
            self._second.close()

    def _ask_first(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused] | None:
        """None while it is gone. It is asked again when its pause is over, which doubles up to `LAST_PROBE_S`."""
        if self._second is not None and time.monotonic() < self._knock_at:
            return None
        try:
            answers = self._first.acquire(extents, timeout_s)
        except DaemonUnavailable as error:
            self._gone = str(error)
            self._pause_s = min(self._pause_s * 2, LAST_PROBE_S)
            self._knock_at = time.monotonic() + self._pause_s
            return None
        self._pause_s = FIRST_PROBE_S
        return answers

    def _ask_second(
        self, extents: Sequence[int], timeout_s: float, why: str
    ) -> list[Granted | Refused] | None:
        second = self._second  # another thread may find out meanwhile that it has no credentials
        if second is None:
            return None
        try:
            answers = second.acquire(extents, max(0.0, timeout_s))
        except NotAllowed as refusal:
            _log.warning("%s, and reading directly is not possible: %s", why, refusal)
            self._second = None
            return None
        except DeadlineExceeded:
            return None
        with self._lock:
            if not self.around_bytes:
                _log.warning("%s: reading directly from the source until it is back", why)
            for answer in answers:
                if isinstance(answer, Granted):
                    self._around[answer.extent] = self._around.get(answer.extent, 0) + 1
                    self.around_bytes += answer.size_bytes
        return answers
