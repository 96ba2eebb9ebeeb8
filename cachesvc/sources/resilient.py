"""Decorator of a `Source`: retries with full jitter, a deadline, a rate that adapts to throttling, a circuit breaker for a
source that is down, and hedged reads (`timed_reads.py`)."""

from __future__ import annotations

import logging
import math
import random
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn, TypeVar

from cachesvc.core.errors import CacheError, SourceUnavailable
from cachesvc.core.limits import REQUEST_S
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.backoff import backoff_s
from cachesvc.core.rates.circuit_breaker import CircuitBreaker
from cachesvc.sources.paces import RATE_POLL_S, SharedHedges, SharedPace
from cachesvc.sources.source import Checker, OnReceived, Paged, Source, ignore_received
from cachesvc.sources.timed_reads import Interruptible, TimedReads

log = logging.getLogger(__name__)
T = TypeVar("T")
BREAKER_POLL_S = 0.25
"""How often a call polls the breaker of a source that is down."""
PAUSE_POLL_S = 0.5
"""How often a call that waits for its next try looks whether it was given up."""
PROGRESS_BYTES, PROGRESS_SHARE = 64 << 10, 1 / 4
SLOW_S = 30.0
"""An answer that is cut short after so many bytes, or this share of what was asked for, in less time, is progress and no
failure. A read of n bytes that are cut so ends after log(n) / log(4 / 3) answers at most."""


@dataclass(frozen=True, slots=True)
class Resilience:
    """Limits of retries.

    `deadline_s` covers all tries of one request: a read, a HEAD, or one page of a listing. No try starts after it. A
    request's wait for its turn in the rate is not counted while the source serves other requests. `concurrency`: the most
    requests at a time.
    """

    deadline_s: float = REQUEST_S
    concurrency: int = 64
    hedge: bool = True


class _Answered(Exception):
    """Ends a listing after its first answer."""


def _send_first(request: Callable[[], object], /) -> NoReturn:
    request()
    raise _Answered


class Resilient:
    """A `Source` with retries, at rates of requests and bytes that other processes may share. `clock`, `chance` (uniform in
    [0, 1)) and `sleep` are arguments for tests."""

    def __init__(
        self,
        source: Source,
        resilience: Resilience | None = None,
        clock: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        sleep: Callable[[float], None] = time.sleep,
        pace: SharedPace | None = None,
        bytes_pace: SharedPace | None = None,
        hedges: SharedHedges | None = None,
    ) -> None:
        self._source, self._clock, self._chance, self._sleep = source, clock, chance, sleep
        self._resilience = resilience or Resilience()
        self._lock = threading.Lock()
        self._under_way = threading.Semaphore(self._resilience.concurrency)
        self._pace, self._bytes_pace = pace or SharedPace(), bytes_pace
        self._limited = self._said_cut = False
        self._breaker = CircuitBreaker()
        self._last_error = ""
        self._answered_at = self._failed_at = -math.inf
        self._waiting = 0
        """Calls without an answer so far."""
        hedges = hedges or SharedHedges()
        self._reads = TimedReads(source, hedges, self._pace, bytes_pace, clock, sleep)
        self.counters = self._reads.counters
        self._calling: set[int] = set()
        """Threads with a call under way; those in `_given_up` are to end it."""
        self._given_up: set[int] = set()

    def silent_s(self, since: float) -> float:
        """Seconds for which the source has left its callers without an answer. A failure after `since` (of `clock`) counts
        the whole outage. Without one the time after `since` counts, but not where a listing is one long call."""
        with self._lock:
            now = self._clock()
            if self._breaker.open and self._failed_at >= since:
                return self._breaker.down_s(now)
            if not self._waiting or not isinstance(self._source, Paged):
                return 0.0
            return now - max(self._answered_at, since)

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """List the source with retries; yields the first object when the listing is complete."""
        if isinstance(self._source, Paged):
            return iter([*self._source.list_by(prefix, self._with_retries)])
        return iter(self._with_retries(lambda: [*self._source.list(prefix)]))

    def probe(self, prefix: str) -> None:
        """Send the first request of a listing, once. Raises its error."""
        if isinstance(self._source, Paged):
            with suppress(_Answered):
                next(iter(self._source.list_by(prefix, _send_first)), None)
        else:
            next(iter(self._source.list(prefix)), None)

    def head(self, uri: str) -> ObjectVersion:
        """Return the object's version, with retries."""
        return self._with_retries(lambda: self._source.head(uri))

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Read a range with retries, hedged when the source is `Interruptible`. After an answer that was cut short, only
        the rest is asked for. An object that was put together so is compared with what the source states of it."""
        if self._read_on(version, offset, into, received):
            check = self.checker(version) if len(into) == version.size_bytes else None
            if check is not None:
                try:
                    check((into,))
                except SourceUnavailable:
                    self._read_on(version, offset, into, received)
                    check((into,))

    def _read_on(self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived) -> bool:
        """Read a range. Return whether more than one answer made it."""
        done = 0

        def read_rest() -> None:
            nonlocal done
            asked = len(into) - done
            try:
                hedged = self._resilience.hedge and not self._limited
                rest, counted = into[done:], lambda count: received(done + count)
                self._reads.read(version, offset + done, rest, counted, hedged)
            except SourceUnavailable as error:
                if not version.etag:  # the rest might be of another version
                    error.kept_bytes = 0
                error.progress = 0 < error.kept_bytes >= min(PROGRESS_BYTES, asked * PROGRESS_SHARE)
                done += error.kept_bytes
                raise

        self._with_retries(read_rest, len(into))
        return done > 0

    def checker(self, version: ObjectVersion) -> Checker | None:
        """Return the source's checker, requested with retries. An object that it finds damaged counts as a retry."""
        check = self._with_retries(lambda: self._source.checker(version))
        if check is None:
            return None

        def counted(data: Iterable[memoryview]) -> None:
            try:
                check(data)
            except SourceUnavailable:
                with self._lock:
                    self.counters.retries += 1
                raise

        return counted

    def give_up(self, threads: Collection[int]) -> None:
        """Make the calls fail that run in threads (`threading.get_ident()`), soon. A source that throttles is waited for:
        another call would have to begin again at the end of its queue. A read that cannot be interrupted goes on."""
        with self._lock:
            ended = self._calling.intersection(threads) if not self._limited else set[int]()
            self._given_up |= ended
        if isinstance(self._source, Interruptible):
            for thread in ended:
                self._source.interrupt(thread)

    def close(self) -> None:
        """Stop hedging and close the source."""
        self._reads.close()
        self._source.close()

    def _with_retries(self, call: Callable[[], T], size_bytes: int = 0) -> T:
        thread = threading.get_ident()
        with self._lock:
            self._waiting += 1
            self._calling.add(thread)
        try:
            return self._retried(call, size_bytes)
        finally:
            with self._lock:
                self._waiting -= 1
                self._calling.discard(thread)
                self._given_up.discard(thread)

    def _check_given_up(self) -> None:
        if threading.get_ident() in self._given_up:
            raise SourceUnavailable(f"the source sent nothing in time: {self._last_error or 'no answer'}")

    def _pause(self, wait_s: float) -> None:
        """Sleep between two tries. Raises SourceUnavailable where the call is given up."""
        while wait_s > 0:
            self._check_given_up()
            self._sleep(min(wait_s, PAUSE_POLL_S))
            wait_s -= PAUSE_POLL_S
        self._check_given_up()

    def _retried(self, call: Callable[[], T], size_bytes: int) -> T:
        until = self._clock() + self._resilience.deadline_s
        attempt = refusals = 0
        while True:
            self._wait_while_down(until)
            until += self._wait_for_rate(until)
            if self._bytes_pace is not None and size_bytes:
                until += self._bytes_pace.take(size_bytes, self._clock, self._sleep)
            try:
                with self._under_way:
                    sent_at = self._clock()
                    answer = call()
            except SourceUnavailable as error:
                self._check_given_up()
                if error.progress and self._clock() - sent_at < SLOW_S:
                    self._cut_short(error, sent_at)
                    until, attempt = self._clock() + self._resilience.deadline_s, 0
                    continue
                now = self._failed(error, sent_at)
                refusals += error.throttled
                wait_s = self._chance() * backoff_s(attempt)
                if refusals > 1 or not error.throttled:
                    # A source at its limit does not care which read comes next, so after a first refusal the rate alone
                    # obeys Retry-After, and this fill does not wait longer than others. A second refusal may be of this
                    # very object. Jitter on top keeps refused calls from returning at the same instant.
                    wait_s = max(wait_s, error.retry_after_s * (1 + 0.25 * self._chance()))
                if now + wait_s >= until:
                    raise
                attempt += 1
                with self._lock:
                    self.counters.retries += 1
                self._pause(wait_s)
            except CacheError:
                self._answered(sent_at)
                raise
            else:
                self._answered(sent_at)
                return answer

    def _cut_short(self, error: SourceUnavailable, sent_at: float) -> None:
        """Note an answer that was cut short: the source works, and the rest can be asked for at once."""
        self._answered(sent_at)
        with self._lock:
            self.counters.retries += 1
            said, self._said_cut = self._said_cut, True
        if not said:
            log.warning(
                "answers are cut short, and their rest is asked for; look at the proxies on the way: %s",
                error,
            )

    def _answered(self, sent_at: float) -> None:
        with self._pace.held() as pace:
            pace.accepted(sent_at, self._clock())
        with self._lock:
            self._breaker.succeeded()
            self._answered_at = self._clock()

    def _failed(self, error: SourceUnavailable, sent_at: float) -> float:
        """Note a failure. Return the time."""
        with self._lock:
            now = self._clock()
            self._last_error, self._failed_at = str(error), now
            opened = self._breaker.failed(now)
            self.counters.throttled += error.throttled
        if error.throttled:
            with self._pace.held() as pace:
                pace.refused(sent_at, now, error.retry_after_s)
        if opened:
            log.warning(
                "a source does not answer and is tried for up to %.0f s: %s",
                self._resilience.deadline_s,
                error,
            )
        return now

    def _wait_while_down(self, until: float) -> None:
        """Wait until the breaker lets a call through. Raises SourceUnavailable at `until`, and at once for a source that
        has been down for longer than `deadline_s`."""
        while True:
            with self._lock:
                now = self._clock()
                wait_s = self._breaker.ask(now)
                down_s = self._breaker.down_s(now)
            if not wait_s:
                return
            if now + wait_s >= until or down_s >= self._resilience.deadline_s:
                raise SourceUnavailable(f"the source has been down for {down_s:.0f} s: {self._last_error}")
            self._pause(min(wait_s, BREAKER_POLL_S))

    def _wait_for_rate(self, until: float) -> float:
        """Wait for this call's turn in the rate of a source that throttles. Return the wait in seconds, 0 if the source
        served no call meanwhile. Raises SourceUnavailable at `until` when the source has served no call for
        `deadline_s`."""
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
                raise SourceUnavailable(f"the source throttles beyond the deadline: {self._last_error}")
            self._sleep(min(wait_s, RATE_POLL_S))
