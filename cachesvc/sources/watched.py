"""Watches calls that have no timeout: a read on a hung NFS mount waits in the kernel for as long as it hangs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachesvc.core.limits import HUNG_S
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import OnReceived, Source, ignore_received


class CallWatch:
    """The calls under way in this process. Thread-safe; one thread may call `hung_after`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held_up_s = 0.0
        self._under_way: dict[int, tuple[float, str]] = {}

    @contextmanager
    def watching(self, uri: str) -> Iterator[None]:
        """Watch the body of the `with`, a call about `uri` in this thread, which hangs after `HUNG_S` without
        `heartbeat`."""
        thread = threading.get_ident()
        self._under_way[thread] = self._ran_s() + HUNG_S, uri
        try:
            yield
        finally:
            del self._under_way[thread]

    def heartbeat(self) -> None:
        """Note progress of this thread's call, if it is in one. A listing yields its first object only after the whole
        folder, a million files perhaps, has been read and sorted."""
        thread = threading.get_ident()
        if under_way := self._under_way.get(thread):
            self._under_way[thread] = self._ran_s() + HUNG_S, under_way[1]

    def hung_uri(self) -> str:
        """Return the URI of a call that hangs; else ""."""
        until, uri = min(tuple(self._under_way.values()), default=(math.inf, ""))
        return uri if self._ran_s() > until else ""

    def hung_after(self, every_s: float, sleep: Callable[[float], None] = time.sleep) -> str:
        """Sleep, then return `hung_uri`. When the sleep took longer than it should, this process was stopped or had no
        core: the calls' limits are extended by that time."""
        began_at = self._clock()
        sleep(every_s)
        self._held_up_s += max(0.0, self._clock() - began_at - every_s)
        return self.hung_uri()

    def _ran_s(self) -> float:
        return self._clock() - self._held_up_s


class WatchedSource:
    """A `Source` that registers its calls in `calls`: a decorator for sources without timeouts of their own."""

    def __init__(self, source: Source, calls: CallWatch) -> None:
        self._source, self._calls = source, calls
        self.checker, self.close = source.checker, source.close

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """List the source; each object is a call of its own."""
        found = iter(self._source.list(prefix))
        while True:
            with self._calls.watching(prefix):
                version = next(found, None)
            if version is None:
                return
            yield version

    def head(self, uri: str) -> ObjectVersion:
        """Return the object's current version."""
        with self._calls.watching(uri):
            return self._source.head(uri)

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Read a range of the source."""
        with self._calls.watching(version.uri):
            self._source.read_into(version, offset, into, received)
