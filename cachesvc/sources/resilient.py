"""Patience around a source: retries with full jitter, a deadline, a rate that gives way when the source throttles,
a breaker for one that is down, and hedged reads. A decorator, itself a `Source`.

Hedging: a read that runs longer than the tail of recent latencies is asked a second time, into a buffer of
its own. Whichever finishes first wins: when it is the second, the first is interrupted, and its bytes are
overwritten only after it has returned, so a late loser never writes over the winner's.
"""

from __future__ import annotations

import heapq
import math
import operator
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import astuple, dataclass, field
from typing import Protocol, TypeVar, runtime_checkable

from cachesvc.core.errors import CacheError, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.backoff import LatencyTail, SourceBreaker, full_jitter_s, hedge_allowed
from cachesvc.sources.paces import SharedPace
from cachesvc.sources.source import Checker, Source

T = TypeVar("T")
HEDGE_THREADS = 4
BREAKER_POLL_S = 0.25
"""How often one who waits for a source that is down looks whether it is back."""
RATE_POLL_S = 1.0
"""How often one who stands in line for a source that throttles looks how fast the line moves."""


@dataclass(frozen=True, slots=True)
class Resilience:
    """How patient. `deadline_s` covers all tries of one call; no new try starts after it. What a call stands in line
    for a source that throttles is not counted, as long as the source serves those before it. `attempts` are tries
    that failed while the source was up: waiting for one that throttles or is down ends with the deadline alone."""

    deadline_s: float = 120.0
    attempts: int = 8
    concurrency: int = 64
    hedge: bool = True


@dataclass(slots=True)
class SourceCounters:
    """What was asked of the source: reads, each try of them, the bytes that came; the tries after the first of any
    call; answers that asked for fewer. `hedges` and `hedge_bytes` are not in `requests` and `bytes`."""

    requests: int = 0
    bytes: int = 0
    retries: int = 0
    throttled: int = 0
    hedges: int = 0
    hedge_wins: int = 0
    hedge_bytes: int = 0

    def __add__(self, more: SourceCounters) -> SourceCounters:
        return SourceCounters(*map(operator.add, astuple(self), astuple(more)))

    def __sub__(self, before: SourceCounters) -> SourceCounters:
        return SourceCounters(*map(operator.sub, astuple(self), astuple(before)))


@runtime_checkable
class Interruptible(Protocol):
    """A source whose reads can be made to fail from another thread; only these are hedged."""

    def interrupt(self, thread: int) -> None:
        """Make the read that runs in that thread fail now."""
        ...


@dataclass(slots=True)
class _Read:
    """One read that may be hedged; its fields change under the lock of `Resilient`."""

    version: ObjectVersion
    offset: int
    size: int
    thread: int = field(default_factory=threading.get_ident)
    running: bool = True
    answer: bytearray | None = None


class Resilient:
    """`Source` that tries again, at a pace that other processes may share. Clock, chance and sleep are arguments for
    tests."""

    def __init__(
        self,
        source: Source,
        resilience: Resilience | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        sleep: Callable[[float], None] = time.sleep,
        pace: SharedPace | None = None,
    ) -> None:
        self._source, self._clock, self._chance, self._sleep = source, clock, chance, sleep
        self._resilience = resilience or Resilience()
        self._counters = SourceCounters()
        self._lock = threading.Lock()
        self._under_way = threading.Semaphore(self._resilience.concurrency)
        self._pace = pace or SharedPace()
        self._limited = False
        self._breaker = SourceBreaker()
        self._last = ""
        self._tail = LatencyTail()
        self._hedger = _Hedger(self._hedge, clock)

    @property
    def counters(self) -> SourceCounters:
        """Live counts."""
        return self._counters

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """As the source lists, once the listing is complete."""
        return iter(self._with_retries(lambda: [*self._source.list(prefix)]))

    def head(self, uri: str) -> ObjectVersion:
        """As the source's, with patience."""
        return self._with_retries(lambda: self._source.head(uri))

    def read_into(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        """As the source's, with patience."""
        self._with_retries(lambda: self._timed(version, offset, into))

    def checker(self, version: ObjectVersion) -> Checker | None:
        """As the source's, asked for with patience; an object that it finds damaged is one more retry."""
        check = self._with_retries(lambda: self._source.checker(version))
        if check is None:
            return None

        def counted(data: Iterable[memoryview]) -> None:
            try:
                check(data)
            except SourceUnavailable:
                with self._lock:
                    self._counters.retries += 1
                raise

        return counted

    def close(self) -> None:
        """Stop hedging and close the source."""
        self._hedger.close()
        self._source.close()

    def _with_retries(self, call: Callable[[], T]) -> T:
        until = self._clock() + self._resilience.deadline_s
        attempt = failures = refusals = 0
        while True:
            self._wait_while_down(until)
            until += self._wait_for_rate(until)
            try:
                with self._under_way:
                    sent_at = self._clock()
                    answer = call()
            except SourceUnavailable as error:
                failures += self._failed(error, sent_at)
                refusals += error.throttled
                wait_s = full_jitter_s(attempt, self._chance())
                if refusals > 1 or not error.throttled:
                    # Where a source is at its limit, it is the rate that answers a Retry-After: which read comes next is
                    # all the same to it, and a fill would wait for this one. Refused again, it may be this very object.
                    # Jitter on top, or all who were turned away come back in one instant.
                    wait_s = max(wait_s, error.retry_after_s * (1 + 0.25 * self._chance()))
                if failures >= self._resilience.attempts or self._clock() + wait_s >= until:
                    raise
                attempt += 1
                with self._lock:
                    self._counters.retries += 1
                self._sleep(wait_s)
            except CacheError:
                self._answered(sent_at)
                raise
            else:
                self._answered(sent_at)
                return answer

    def _answered(self, sent_at: float) -> None:
        with self._pace.held() as pace:
            pace.accepted(sent_at, self._clock())
        with self._lock:
            self._breaker.succeeded()

    def _failed(self, error: SourceUnavailable, sent_at: float) -> int:
        """1 for a failure that counts against `attempts`, else 0."""
        with self._lock:
            now = self._clock()
            self._last = str(error)
            self._breaker.failed(now)
            self._counters.throttled += error.throttled
            counts = not error.throttled and not self._breaker.open
        if error.throttled:
            with self._pace.held() as pace:
                pace.refused(sent_at, now, error.retry_after_s)
        return int(counts)

    def _wait_while_down(self, until: float) -> None:
        """Raises SourceUnavailable at `until`, and at once where it has been down for longer than any call waits."""
        while True:
            with self._lock:
                now = self._clock()
                wait_s = self._breaker.ask(now)
                down_s = self._breaker.down_s(now)
            if not wait_s:
                return
            if now + wait_s >= until or down_s >= self._resilience.deadline_s:
                raise SourceUnavailable(f"the source has been down for {down_s:.0f} s: {self._last}")
            self._sleep(min(wait_s, BREAKER_POLL_S))

    def _wait_for_rate(self, until: float) -> float:
        """Wait for a place in the rate of a source that throttles; answers for how long, in seconds, where the source
        served somebody meanwhile. Raises SourceUnavailable at `until`, once it has served nobody for as long as a call
        waits."""
        place, joined_at = None, 0.0
        while True:
            with self._pace.held() as pace:
                now = self._clock()
                if place is None:
                    place, joined_at = pace.join(now), now
                wait_s, paused_s, served_at = pace.wait_s(place, now), pace.paused_s(now), pace.served_at
                self._limited = math.isfinite(pace.rate(now))
            if not wait_s:
                return now - joined_at if served_at >= joined_at else 0.0
            if now + paused_s >= max(until, served_at + self._resilience.deadline_s):
                raise SourceUnavailable(f"the source throttles beyond the deadline: {self._last}")
            self._sleep(min(wait_s, RATE_POLL_S))

    def _timed(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        started = self._clock()
        with self._lock:
            self._counters.requests += 1
            hedged = self._resilience.hedge and not self._limited
            tail_s = self._tail.tail_s(len(into)) if hedged else None
        received_bytes = len(into)
        try:
            if tail_s is not None and isinstance(self._source, Interruptible):
                received_bytes = self._raced(version, offset, into, started + tail_s)
            else:
                self._source.read_into(version, offset, into)
        except CacheError as error:
            with self._lock:
                self._counters.bytes += error.received_bytes
            raise
        with self._lock:
            self._counters.bytes += received_bytes
            self._tail.add(len(into), self._clock() - started)

    def _raced(self, version: ObjectVersion, offset: int, into: memoryview, due: float) -> int:
        """How many bytes the first of the two received."""
        read = _Read(version, offset, len(into))
        self._hedger.watch(due, read)
        try:
            self._source.read_into(version, offset, into)
            return len(into)
        except SourceUnavailable as error:
            with self._lock:
                read.running = False
            if read.answer is None:
                raise
            into[:] = read.answer
            return error.received_bytes
        finally:
            with self._lock:
                read.running = False

    def _hedge(self, read: _Read) -> None:
        """Runs in a hedging thread when `read` is late."""
        with self._lock:
            if not read.running or not hedge_allowed(self._counters.hedges, self._counters.requests):
                return
            self._counters.hedges += 1
        answer = bytearray(read.size)
        try:
            self._source.read_into(read.version, read.offset, memoryview(answer))
        except (
            CacheError
        ) as error:  # the first read is still under way and says what is wrong, if anything is
            with self._lock:
                self._counters.hedge_bytes += error.received_bytes
            return
        with self._lock:
            self._counters.hedge_bytes += read.size
            if read.running and isinstance(self._source, Interruptible):
                # (1) the answer is there before (2) the first read fails; (3) its own thread copies.
                self._counters.hedge_wins += 1
                read.answer = answer
                self._source.interrupt(read.thread)


class _Hedger:
    """A thread that watches for late reads, and a few that ask again; started by the first read to watch."""

    def __init__(self, hedge: Callable[[_Read], None], clock: Callable[[], float]) -> None:
        self._hedge, self._clock = hedge, clock
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._due: list[tuple[float, int, _Read]] = []
        self._count = 0
        self._closed = False
        self._thread: threading.Thread | None = None

    def watch(self, due: float, read: _Read) -> None:
        """Call `hedge` at `due` unless the read is over by then."""
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
        """Stop watching; waits for hedges under way."""
        with self._lock:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        with ThreadPoolExecutor(HEDGE_THREADS, "hedge") as threads:
            while (read := self._late()) is not None:
                threads.submit(self._hedge, read)

    def _late(self) -> _Read | None:
        """The next read that is late; None at the end."""
        with self._lock:
            while not self._closed:
                while self._due and not self._due[0][2].running:
                    heapq.heappop(self._due)
                wait_s = self._due[0][0] - self._clock() if self._due else None
                if wait_s is not None and wait_s <= 0:
                    return heapq.heappop(self._due)[2]
                self._changed.wait(wait_s)
        return None
