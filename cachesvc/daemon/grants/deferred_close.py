"""The end of descriptors that strangers sent. To close one may take as long as its sender likes (a socket that lingers, a
file of a FUSE server that answers nothing), so the loop closes only memory; all else is closed by threads that may hang,
no two of them for one user."""

from __future__ import annotations

import fcntl
import logging
import os
import threading
from collections.abc import Iterable
from contextlib import suppress

log = logging.getLogger(__name__)
THREADS = 16
"""So many users may have something that hangs before others' waits."""
A_USER, IN_ALL = 64, 1024
"""Descriptors left; from there on no message that brings more is received (one brings 253 at most)."""
MEMORY_BYTES = 32 << 20
"""More than any plan takes; the kernel frees it in a few milliseconds."""
_BLOCK_BYTES = 512


def harmless(fd: int) -> bool:
    """Whether a descriptor is closed without waiting: only memory has seals, and asking for them waits for nobody."""
    try:
        fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError:
        return False
    return os.fstat(fd).st_blocks * _BLOCK_BYTES <= MEMORY_BYTES


class Disposal:
    """Safe from any thread; nothing here waits for a close."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, list[int]] = {}
        """By user, what no thread has begun with."""
        self._busy: set[int] = set()
        """Users of whom something is being closed."""
        self._threads = 0

    def take(self, user: int, descriptors: Iterable[int]) -> None:
        """Close what a user sent, some time."""
        with self._lock:
            self._left.setdefault(user, []).extend(descriptors)
            if user in self._busy or self._threads == THREADS:
                return
            self._threads += 1
        try:
            threading.Thread(target=self._run, name="disposal", daemon=True).start()
        except RuntimeError as error:  # what is left is for the next one that starts
            with self._lock:
                self._threads -= 1
            log.warning("what a client sent cannot be closed yet", extra={"error": str(error)})

    def held(self, user: int) -> int:
        """How many descriptors of a user are not closed yet."""
        with self._lock:
            return len(self._left.get(user, ())) + (user in self._busy)

    def count(self) -> int:
        """Of all users."""
        with self._lock:
            return sum(map(len, self._left.values())) + len(self._busy)

    def full(self, user: int) -> bool:
        """Whether a user may send no more of them."""
        return bool(self._left or self._busy) and (self.held(user) >= A_USER or self.count() >= IN_ALL)

    def left(self) -> set[int]:
        """Descriptors that nobody else may close."""
        with self._lock:
            return {fd for left in self._left.values() for fd in left}

    def _run(self) -> None:
        user, fd = self._next(None)
        while fd >= 0:
            with suppress(OSError):  # it is closed all the same
                os.close(fd)
            user, fd = self._next(user)

    def _next(self, before: int | None) -> tuple[int | None, int]:
        with self._lock:
            if before is not None:
                self._busy.remove(before)
            user = next((user for user in self._left if user not in self._busy), None)
            if user is None:
                self._threads -= 1
                return None, -1
            self._busy.add(user)
            fd = self._left[user].pop()
            if not self._left[user]:
                del self._left[user]
            return user, fd
