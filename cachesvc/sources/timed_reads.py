"""Reads of a source, each sent once, timed and counted; late ones are sent a second time.

A read whose first byte, or last byte, takes longer than the tail of recent latencies is *hedged*: sent again into a buffer
of its own, where the budget of the node allows it (`SharedHedges`), and not while the source throttles. Where many reads
share the bandwidth of a source, it answers soon and takes long to send: the first byte tells earlier that a read hangs. The
first of the two to finish wins. When that is the second, the first is interrupted, and the answer is copied over its
buffer after it has returned, so a late loser never overwrites the winner's bytes.
"""

from __future__ import annotations

import heapq
import math
import operator
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, fields
from typing import Protocol, runtime_checkable

from cachesvc.core.errors import CacheError, SourceUnavailable
from cachesvc.core.histogram import Histogram
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.backoff import LatencyTail, late_s
from cachesvc.sources.paces import SharedHedges, SharedPace
from cachesvc.sources.source import OnReceived, Source

HEDGE_THREADS = 4
POLL_S = 0.05
"""Interval at which late reads are looked at that the budget has refused."""
_ANY_SIZE = 1
"""The time to the first byte hardly depends on the size."""


@dataclass(slots=True)
class SourceCounters:
    """Counts of a source: read requests, each try being one, and the bytes received for them; tries after the first of any
    call; throttling responses. `requests` and `bytes` do not include `hedges` and `hedge_bytes`."""

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    throttled: int = 0
    hedges: int = 0
    hedge_bytes: int = 0
    waits: Histogram = field(default_factory=Histogram)
    """How long the `requests` took, failed ones included."""

    def __add__(self, more: SourceCounters) -> SourceCounters:
        return SourceCounters(*map(operator.add, _counts(self), _counts(more)))

    def __sub__(self, before: SourceCounters) -> SourceCounters:
        return SourceCounters(*map(operator.sub, _counts(self), _counts(before)))


_counts = operator.attrgetter(*(each.name for each in fields(SourceCounters)))


@runtime_checkable
class Interruptible(Protocol):
    """A source whose reads can be interrupted from another thread; only these are hedged."""

    def interrupt(self, thread: int) -> None:
        """Make the read that runs in that thread fail now."""
        ...


class _Needed(threading.local):
    """How soon the reads of a thread are needed: the lower, the sooner."""

    rank = 0.0


needed = _Needed()


@dataclass(slots=True)
class LateRead:
    """One read that may be hedged; its fields change under the lock of `TimedReads`."""

    version: ObjectVersion
    offset: int
    size: int
    late_at: float = 0.0
    """When it is late although it was answered."""
    thread: int = field(default_factory=threading.get_ident)
    rank: float = field(default_factory=lambda: needed.rank)
    running: bool = True
    answered: bool = False
    """Whether a first byte came."""
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
        """Call `hedge` at `due`, or as soon as `allow` says so. A read that has ended by then is left out, and one that was
        answered waits until it is late. Of several late reads the one that is needed soonest is first."""
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
                now = self._clock()
                self._drop_ended(self._watched)
                while self._watched and self._watched[0][0] <= now:
                    self._sort(now, *heapq.heappop(self._watched)[1:])
                self._drop_ended(self._late)
                if self._late and _in_time(self._late[0][2], now):
                    self._sort(now, *heapq.heappop(self._late)[1:])
                    continue
                if self._late and self._allow(self._late[0][2]):
                    return heapq.heappop(self._late)[2]
                waits = [due - self._clock() for due, _, _ in self._watched[:1]] + [POLL_S] * bool(self._late)
                self._changed.wait(min(waits, default=None))
        return None

    def _sort(self, now: float, number: int, read: LateRead) -> None:
        if _in_time(read, now):
            heapq.heappush(self._watched, (read.late_at, number, read))
        else:
            heapq.heappush(self._late, (read.rank, number, read))

    def _drop_ended(self, reads: list[tuple[float, int, LateRead]]) -> None:
        while reads and not reads[0][2].running:
            heapq.heappop(reads)


def _in_time(read: LateRead, now: float) -> bool:
    return read.answered and now < read.late_at


class TimedReads:
    """Thread-safe. A read waits for nothing but the source."""

    def __init__(
        self,
        source: Source,
        hedges: SharedHedges,
        pace: SharedPace,
        bytes_pace: SharedPace | None,
        clock: Callable[[], float],
        sleep: Callable[[float], None],
    ) -> None:
        """No read is hedged while `pace` is limited. `bytes_pace`: the rate of bytes, of hedges too; None for no limit."""
        self._source, self._hedges, self._clock, self._sleep = source, hedges, clock, sleep
        self._pace, self._bytes_pace = pace, bytes_pace
        self.counters = SourceCounters()
        self._lock = threading.Lock()
        self._latencies, self._answers = LatencyTail(), LatencyTail()
        """Times to the last byte, by size, and to the first, as of one size."""
        self._hedger = Hedger(self._may_hedge, self._hedge, clock)

    def close(self) -> None:
        """Stop hedging."""
        self._hedger.close()

    def read(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived, hedged: bool
    ) -> None:
        """Read a range. `hedged`: it may be sent a second time. Raises as the source does."""
        started, answered_s = self._clock(), math.inf
        with self._lock:
            self.counters.requests += 1
            tail_s = self._latencies.tail_s(len(into)) if hedged else None
            first_s = self._answers.tail_s(_ANY_SIZE)
        read = LateRead(version, offset, len(into))

        def noted(count: int) -> None:
            nonlocal answered_s
            if not read.answered:
                read.answered, answered_s = True, self._clock() - started
            received(count)

        try:
            if tail_s is not None and isinstance(self._source, Interruptible):
                read.late_at = started + late_s(tail_s)
                due = min(read.late_at, started + late_s(math.inf if first_s is None else first_s))
                received_bytes = self._raced(read, into, noted, due)
            else:
                self._source.read_into(version, offset, into, noted)
                received_bytes = len(into)
        except CacheError as error:
            self._hedges.earn(error.received_bytes)
            with self._lock:
                self.counters.bytes += error.received_bytes
                self.counters.waits.observe(self._clock() - started)
            raise
        self._hedges.earn(received_bytes)
        with self._lock:
            took_s = self._clock() - started
            self.counters.bytes += received_bytes
            self.counters.waits.observe(took_s)
            self._latencies.add(len(into), took_s)
            if read.answered and read.answer is None:
                self._answers.add(_ANY_SIZE, answered_s)

    def _raced(self, read: LateRead, into: memoryview, received: OnReceived, due: float) -> int:
        """Read while the hedger may send a second request. Return the bytes that the first one received."""
        self._hedger.watch(due, read)
        try:
            self._source.read_into(read.version, read.offset, into, received)
            return len(into)
        except SourceUnavailable as error:
            with self._lock:
                read.running = False
            if read.answer is None:
                raise
            received(0)
            into[:] = read.answer
            return error.received_bytes
        finally:
            with self._lock:
                read.running = False

    def _may_hedge(self, read: LateRead) -> bool:
        now = self._clock()
        with self._pace.held() as pace:
            limited = math.isfinite(pace.rate(now))
        return not limited and self._hedges.take(read.rank, read.size, now)

    def _hedge(self, read: LateRead) -> None:
        """Send a late read a second time; runs in a hedging thread."""
        if self._bytes_pace is not None:
            self._bytes_pace.take(read.size, self._clock, self._sleep)
        with self._lock:
            wanted = read.running
            self.counters.hedges += wanted
        if not wanted:
            self._hedges.spend(-read.size)
            return
        answer = bytearray(read.size)
        try:
            self._source.read_into(read.version, read.offset, memoryview(answer))
        except CacheError as error:  # the first read is still under way, and reports a lasting error itself
            with self._lock:
                self.counters.hedge_bytes += error.received_bytes
            return
        with self._lock:
            self.counters.hedge_bytes += read.size
            if read.running and isinstance(self._source, Interruptible):
                # Order: (1) the answer is set, (2) the first read fails, (3) the first read's thread copies the answer.
                read.answer = answer
                self._source.interrupt(read.thread)
