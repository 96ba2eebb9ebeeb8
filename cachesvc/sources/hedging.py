"""Sends reads that take long a second time; see `resilient.py`, which decides which of the two wins."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cachesvc.core.model import ObjectVersion

HEDGE_THREADS = 4


@dataclass(slots=True)
class LateRead:
    """One read that may be hedged; its fields change under the lock of `Resilient`."""

    version: ObjectVersion
    offset: int
    size: int
    thread: int = field(default_factory=threading.get_ident)
    running: bool = True
    answer: bytearray | None = None


class Hedger:
    """A thread that waits for late reads, and a few that send them again; started with the first read to watch."""

    def __init__(self, hedge: Callable[[LateRead], None], clock: Callable[[], float]) -> None:
        self._hedge, self._clock = hedge, clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, LateRead]] = []
        self._count = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, due: float, read: LateRead) -> None:
        """Call `hedge` at `due` unless the read has ended by then."""
        with self._lock:
            if self._closed:
                return
            self._count += 1
            heapq.heappush(self._due, (due, self._count, read))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hedger", daemon=True)
                self._thread.start()
            elif self._due[0][2] is read:
                self._changed.notify()

    def close(self) -> None:
        """Stop watching, and wait for hedges under way."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(HEDGE_THREADS, "hedge") as threads:
            while (read := self._next_late()) is not None:
                threads.submit(self._hedge, read)

    def _next_late(self) -> LateRead | None:
        """Wait for the next late read; None after `close`."""
        with self._lock:
            while not self._closed:
                while self._due and not self._due[0][2].running:
                    heapq.heappop(self._due)
                wait_s = self._due[0][0] - self._clock() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
        return None
