"""Sends reads that take long a second time; see `resilient.py`, which decides which of the two wins."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from cachesvc.core.model import ObjectVersion

HEDGE_THREADS = 4
POLL_S = 0.05
"""Interval at which late reads are looked at that the budget has refused."""


class _Needed(threading.local):
    """How soon the reads of a thread are needed: the lower, the sooner."""

    rank = 0.0


needed = _Needed()


@dataclass(slots=True)
class LateRead:
    """One read that may be hedged; its fields change under the lock of `Resilient`."""

    version: ObjectVersion
    offset: int
    size: int
    thread: int = field(default_factory=threading.get_ident)
    rank: float = field(default_factory=lambda: needed.rank)
    running: bool = True
    answer: bytearray | None = None


class Hedger:
    """A thread that waits for late reads, and a few that send them again; started with the first read to watch."""

    def __init__(
        self,
        allow: Callable[[LateRead], bool],
        hedge: Callable[[LateRead], None],
        clock: Callable[[], float],
    ) -> None:
        self._allow, self._hedge, self._clock = allow, hedge, clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._watched: list[tuple[float, int, LateRead]] = []
        """Heap of (due, number, read)."""
        self._late: list[tuple[float, int, LateRead]] = []
        """Heap of (rank, number, read): reads that are due, and not sent again yet."""
        self._count = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, due: float, read: LateRead) -> None:
        """Call `hedge` at `due` unless the read has ended by then, or as soon as `allow` says so. Of several late reads the
        one that is needed soonest is first."""
        with self._lock:
            if self._closed:
                return
            self._count += 1
            heapq.heappush(self._watched, (due, self._count, read))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="hedger", daemon=True)
                self._thread.start()
            elif self._watched[0][2] is read:
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
                self._drop_ended(self._watched)
                while self._watched and self._watched[0][0] <= self._clock():
                    _, number, read = heapq.heappop(self._watched)
                    heapq.heappush(self._late, (read.rank, number, read))
                self._drop_ended(self._late)
                if self._late and self._allow(self._late[0][2]):
                    return heapq.heappop(self._late)[2]
                waits = [due - self._clock() for due, _, _ in self._watched[:1]] + [POLL_S] * bool(self._late)
                self._changed.wait(min(waits, default=None))
        return None

    def _drop_ended(self, reads: list[tuple[float, int, LateRead]]) -> None:
        while reads and not reads[0][2].running:
            heapq.heappop(reads)
