"""CallWatch that cannot be interrupted, watched: a read on a hung NFS mount waits in the kernel for as long as it hangs."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import Checker, Source

HUNG_S = 30.0
"""A disk that spins up takes 10 s, a server that reboots minutes: those waits are of retries, not of one call."""


class CallWatch:
    """The calls under way in this process; for many threads, one of which may `look`."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._held_up_s = 0.0
        self._under_way: dict[int, tuple[float, str]] = {}

    @contextmanager
    def watching(self, uri: str) -> Iterator[None]:
        """This thread is in a call about `uri` that hangs if it takes longer than `HUNG_S` without a word."""
        thread = threading.get_ident()
        self._under_way[thread] = self._ran_s() + HUNG_S, uri
        try:
            yield
        finally:
            del self._under_way[thread]

    def heartbeat(self) -> None:
        """This thread's call, if it is in one, comes along: the first object of a folder is known when all of it, a
        million files perhaps, has been read and sorted."""
        thread = threading.get_ident()
        if under_way := self._under_way.get(thread):
            self._under_way[thread] = self._ran_s() + HUNG_S, under_way[1]

    def hung_uri(self) -> str:
        """The URI of a call that is beyond its limit; else ""."""
        until, uri = min(tuple(self._under_way.values()), default=(math.inf, ""))
        return uri if self._ran_s() > until else ""

    def hung_after(self, every_s: float, sleep: Callable[[float], None] = time.sleep) -> str:
        """`hung`, after a sleep. By how much that was too long, this process was stopped or had no core: no witness
        against a source."""
        began_at = self._clock()
        sleep(every_s)
        self._held_up_s += max(0.0, self._clock() - began_at - every_s)
        return self.hung_uri()

    def _ran_s(self) -> float:
        return self._clock() - self._held_up_s


class WatchedSource:
    """A `Source` that says in `calls` what it is doing: a decorator for sources without time-outs of their own."""

    def __init__(self, source: Source, calls: CallWatch) -> None:
        self._source, self._calls = source, calls

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """As the source lists; each object is a call of its own."""
        found = iter(self._source.list(prefix))
        while True:
            with self._calls.watching(prefix):
                version = next(found, None)
            if version is None:
                return
            yield version

    def head(self, uri: str) -> ObjectVersion:
        """As the source's."""
        with self._calls.watching(uri):
            return self._source.head(uri)

    def read_into(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        """As the source's."""
        with self._calls.watching(version.uri):
            self._source.read_into(version, offset, into)

    def checker(self, version: ObjectVersion) -> Checker | None:
        """The source's."""
        return self._source.checker(version)

    def close(self) -> None:
        """Close the source."""
        self._source.close()
