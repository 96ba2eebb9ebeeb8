"""Watches the reads of one extent, and has those given up that bring nothing for a while."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from types import TracebackType

from cachesvc.sources.timed_reads import needed

POLL_S = 0.25
"""Between two looks, and between two tries to interrupt reads, which may be between two requests."""


class ReadWatch:
    """Calls `give_up` with the threads whose reads are to be interrupted, again and again until they end. Context manager
    around the reads; thread-safe."""

    def __init__(
        self,
        wait_s: float = math.inf,
        give_up: Callable[[Collection[int]], None] = lambda threads: None,
        clock: Callable[[], float] = time.monotonic,
        rank: float = 0.0,
    ) -> None:
        """`wait_s`: how long the reads may bring nothing. `rank`: the lower, the sooner they are needed."""
        self._wait_s, self._give_up, self._clock, self._rank = wait_s, give_up, clock, rank
        self._threads: set[int] = set()
        self._moved_at = clock()
        self._ended = threading.Event()
        self.expired = False

    def __enter__(self) -> ReadWatch:
        self._moved_at = self._clock()
        if self._wait_s < math.inf:
            threading.Thread(target=self._run, name="read-watch", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()

    def moved(self) -> None:
        """Note that bytes came."""
        self._moved_at = self._clock()

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Watch the reads that this thread makes in the body of the `with`."""
        thread = threading.get_ident()
        self._threads.add(thread)
        needed.rank = self._rank
        try:
            yield
            self.moved()
        finally:
            needed.rank = 0.0
            self._threads.discard(thread)

    def _run(self) -> None:
        while not self._ended.wait(min(POLL_S, self._wait_s)):
            if self.expired or self._clock() - self._moved_at >= self._wait_s:
                self.expired = True
                self._give_up(self._threads.copy())
