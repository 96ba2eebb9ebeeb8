"""One thread of a process looks after what readers hold, though none of them reads just now: a daemon that was started
again is to know of it soon (their plans wait until they read: nothing is fetched for who rests), and a node whose memory
runs short is to get it back."""

from __future__ import annotations

import os
import threading
import time
import weakref
from contextlib import suppress
from typing import Protocol

from cachesvc.core.errors import CacheError

EVERY_S = 1.0
"""A look costs a system call, a connect that fails 20 us."""


class Polled(Protocol):
    """Something that is to be looked at now and then."""

    def look(self) -> None:
        """Do what is due. Raises CacheError, OSError where that is not possible; the next read says so."""
        ...


class _Presence:
    """Keeps nothing alive: who is forgotten is no longer looked after."""

    def __init__(self) -> None:
        self.process = os.getpid()
        self._lock = threading.RLock()  # who is collected just now leaves in the midst of anything
        self._kept: weakref.WeakSet[Polled] = weakref.WeakSet()
        threading.Thread(target=self._run, name="presence", daemon=True).start()

    def add(self, each: Polled) -> None:
        with self._lock:
            self._kept.add(each)

    def discard(self, each: Polled) -> None:
        with self._lock:
            self._kept.discard(each)

    def _run(self) -> None:
        while True:
            time.sleep(EVERY_S)  # not a wait for anybody: whoever reads connects by itself
            self._look()

    def _look(self) -> None:
        with self._lock:
            kept = list(self._kept)
        for each in kept:
            with suppress(CacheError, OSError):
                each.look()


_presence: _Presence | None = None


def look_after(each: Polled) -> None:
    """Call its `look` now and then, from a thread, until it is forgotten or `leave_alone`."""
    global _presence
    presence = _presence
    if presence is None or presence.process != os.getpid():  # a forked child has no threads
        presence = _presence = (
            _Presence()
        )  # two threads may make two, and both do; a lock could be held in a fork
    presence.add(each)


def leave_alone(each: Polled) -> None:
    """It is not to be looked at any more."""
    if _presence is not None and _presence.process == os.getpid():
        _presence.discard(each)
