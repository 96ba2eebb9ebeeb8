"""Polls idle readers once a second, on one thread per process.

A reader that does not read just now must still connect to a restarted daemon, so that its leases count there (plans are
sent at its next read: nothing is fetched for an idle reader), and release memory when the node runs short.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Protocol

from cachesvc.core.errors import CacheError

EVERY_S = 1.0
"""A poll costs a system call; a connect that fails, 20 us."""


class Polled(Protocol):
    """An object that is polled regularly."""

    def poll(self) -> None:
        """Reconnect, and release recalled memory, if either is due. CacheError and OSError are ignored; the next read
        raises them."""
        ...


class _Poller:
    """The polling thread of a process. It holds weak references only."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._lock = threading.RLock()  # re-entrant: garbage collection may call `discard` at any point
        self._polled: weakref.WeakSet[Polled] = weakref.WeakSet()
        threading.Thread(target=self._run, name="cachesvc-poll", daemon=True).start()

    def add(self, each: Polled) -> None:
        with self._lock:
            self._polled.add(each)

    def discard(self, each: Polled) -> None:
        with self._lock:
            self._polled.discard(each)

    def _run(self) -> None:
        while True:
            time.sleep(EVERY_S)  # delays no read: a reader that reads connects by itself
            self._poll_all()

    def _poll_all(self) -> None:
        with self._lock:
            polled = [weakref.ref(each) for each in self._polled]
        while polled:
            each = polled.pop()()  # one at a time: a poll that takes long keeps no other reader alive
            if each is not None:
                with suppress(CacheError, OSError):
                    each.poll()


_poller: _Poller | None = None


def start_polling(each: Polled) -> None:
    """Call `each.poll()` every second, from a thread, until it is garbage or `stop_polling`."""
    global _poller
    poller = _poller
    if poller is None or poller.process != os.getpid():  # a forked child has no threads
        # Two threads may make two pollers, and both poll. A lock instead could be held across a fork.
        poller = _poller = _Poller()
    poller.add(each)


def stop_polling(each: Polled) -> None:
    """End the calls of `each.poll()`."""
    if _poller is not None and _poller.process == os.getpid():
        _poller.discard(each)
