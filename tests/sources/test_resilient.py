"""Retries and deadlines, with fake sources that fail and a fake clock."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import NotFound, SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.backoff import (
    LATENCY_SAMPLES,
    LatencyTail,
    Pace,
    backoff_s,
)
from cachesvc.core.rates.circuit_breaker import SOURCE_TRIP
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.source import OnReceived, Send, ignore_received
from testbed import WAIT_S
from tests.support.clock import Clock
from tests.support.reads import FakeSource

X = ObjectVersion("fake://x", 4, "v")


class FlakySource(FakeSource):
    """A source that fails the first `failures` calls, optionally as throttled, and whose listing of ten objects breaks
    off."""

    def __init__(self, failures: int, throttled: bool = False, retry_after_s: float = 0.0) -> None:
        self.failures, self.throttled, self.retry_after_s = failures, throttled, retry_after_s
        self.calls = 0

    def _maybe(self) -> None:
        self.calls += 1
        if self.calls <= self.failures:
            error = SourceUnavailable("flaky")
            error.throttled, error.retry_after_s = self.throttled, self.retry_after_s
            raise error

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        for number in range(10):
            if number == 5:
                self._maybe()
            yield ObjectVersion(f"{prefix}{number}", 1, "v")

    def head(self, uri: str) -> ObjectVersion:
        self._maybe()
        if uri == "fake://missing":
            raise NotFound(uri)
        return ObjectVersion(uri, 1, "v")

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        self._maybe()
        into[:] = b"data"[offset : offset + len(into)]


class PagedSource(FlakySource):
    """A source whose listing takes a request for each object. Every second request fails."""

    def __init__(self, pages: int, throttled: bool) -> None:
        super().__init__(0, throttled)
        self.pages = pages

    def list_by(self, prefix: str, send: Send) -> Iterator[ObjectVersion]:
        for number in range(self.pages):
            send(self._ask)
            yield ObjectVersion(f"{prefix}{number}", 1, "v")

    def _ask(self) -> None:
        self.failures = self.calls + self.calls % 2
        self._maybe()


class DeadSource(FlakySource):
    """A source that refuses connections until `until`."""

    def __init__(self, clock: Clock, until: float = math.inf) -> None:
        super().__init__(0)
        self.clock, self.until = clock, until

    def _maybe(self) -> None:
        self.clock.now += 0.01
        self.failures = self.calls + (self.clock.now < self.until)
        super()._maybe()


class CuttingSource(FlakySource):
    """A source that sends `share` of each answer, and the last bytes whole."""

    def __init__(self, share: float) -> None:
        super().__init__(0)
        self.share = share

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        self.calls += 1
        kept_bytes = int(self.share * len(into)) or len(into)
        into[:kept_bytes] = bytes(offset + n & 255 for n in range(kept_bytes))
        if kept_bytes < len(into):
            error = SourceUnavailable("cut")
            error.kept_bytes = kept_bytes
            raise error


def _resilient(source: FlakySource, clock: Clock, **settings: float) -> Resilient:
    return Resilient(source, Resilience(**settings), clock, lambda: 0.5, clock.sleep)  # type: ignore[arg-type]


def test_a_call_is_retried_until_it_succeeds() -> None:
    clock, source, into = Clock(), FlakySource(3), bytearray(4)
    patient = _resilient(source, clock)
    patient.read_into(X, 0, memoryview(into))
    assert bytes(into) == b"data"
    assert (source.calls, patient.counters.requests, patient.counters.retries) == (4, 4, 3)
    assert clock.now == pytest.approx(0.5 * (0.1 + 0.2 + 0.4))


@pytest.mark.parametrize("size", [2, 10_000, 250_000])
def test_small_answers_that_are_all_cut_are_progress_and_no_outage(size: int) -> None:
    clock, source, into = Clock(), CuttingSource(1 / 3), bytearray(size)
    version = ObjectVersion("fake://x", size + 1, "v")
    _resilient(source, clock).read_into(version, 0, memoryview(into))
    assert into == bytes(n & 255 for n in range(size))
    assert clock.now == 0.0


def test_a_lone_call_is_tried_until_its_deadline_and_not_beyond() -> None:
    clock, source = Clock(), FlakySource(1000)
    with pytest.raises(SourceUnavailable):
        _resilient(source, clock).head("fake://x")
    assert 110 <= clock.now <= 120
    assert source.calls < 40
    with pytest.raises(SourceUnavailable):
        _resilient(FlakySource(1000), clock := Clock(), deadline_s=30).head("fake://x")
    assert 20 <= clock.now <= 30


@pytest.mark.parametrize("throttled", [False, True])
def test_each_page_of_a_listing_is_retried_by_itself(throttled: bool) -> None:
    source = PagedSource(pages=1000, throttled=throttled)
    assert len(list(_resilient(source, Clock()).list("fake://"))) == 1000
    assert source.calls == 1999


def test_a_missing_object_is_requested_once() -> None:
    source = FlakySource(0)
    with pytest.raises(NotFound):
        _resilient(source, Clock()).head("fake://missing")
    assert source.calls == 1


def test_retry_after_is_honoured_by_this_call_and_by_the_next() -> None:
    clock, source = Clock(), FlakySource(1, throttled=True, retry_after_s=7)
    patient = _resilient(source, clock)
    patient.head("fake://x")
    assert clock.now >= 7
    assert patient.counters.throttled == 1
    patient = _resilient(FlakySource(1, throttled=True, retry_after_s=7), clock := Clock(), deadline_s=6)
    for _ in range(2):
        with pytest.raises(SourceUnavailable):
            patient.head("fake://x")
    assert clock.now < 7


def test_a_retry_after_holds_a_read_that_is_refused_twice_where_others_are_served() -> None:
    clock, source = Clock(), FlakySource(0, throttled=True, retry_after_s=7)
    patient = _resilient(source, clock)
    for refusals, least_s, most_s in ((1, 0.0, 2.0), (2, 7.0, 11.0)):
        for _ in range(100):
            patient.head("fake://x")
        source.calls, source.failures, began = 0, refusals, clock.now
        patient.head("fake://x")
        assert least_s <= clock.now - began <= most_s
        clock.now += 2 * Pace.CALM_S


def test_retry_after_of_a_failing_server_is_honoured() -> None:
    clock = Clock()
    _resilient(FlakySource(1, retry_after_s=7), clock).head("fake://x")
    assert clock.now >= 7


@pytest.mark.parametrize("retry_after_s", [5.0, 30.0, 60.0, 100.0])
def test_a_source_that_refuses_everybody_is_given_up_at_the_deadline(retry_after_s: float) -> None:
    clock, source = Clock(), FlakySource(1 << 30, throttled=True, retry_after_s=retry_after_s)
    with pytest.raises(SourceUnavailable):
        _resilient(source, clock, deadline_s=120).head("fake://x")
    assert clock.now <= 120
    assert source.calls <= 2 + 120 / retry_after_s


def test_a_listing_that_breaks_off_is_repeated() -> None:
    patient = _resilient(FlakySource(2), Clock())
    assert [v.uri for v in patient.list("fake://")] == [f"fake://{number}" for number in range(10)]


def test_an_outage_shorter_than_the_deadline_is_waited_out_with_few_requests() -> None:
    clock = Clock()
    source = DeadSource(clock, until=100.0)
    patient = _resilient(source, clock)
    assert patient.head("fake://x").uri == "fake://x"
    assert clock.now < 100 + SOURCE_TRIP.cap_s + 1
    assert source.calls < 40


def test_a_source_that_is_gone_is_one_typed_error_in_bounded_time_and_then_at_once() -> None:
    clock = Clock()
    source = DeadSource(clock)
    patient = _resilient(source, clock, deadline_s=60)
    with pytest.raises(SourceUnavailable, match="flaky"):
        patient.head("fake://x")
    assert clock.now <= 60
    clock.now += 30
    calls = source.calls
    for _ in range(50):
        before = clock.now
        with pytest.raises(SourceUnavailable, match=r"down for|flaky"):
            patient.head("fake://x")
        assert clock.now - before <= 60
    assert source.calls - calls < 50


@given(st.integers(0, 10_000))
def test_backoff_doubles_up_to_its_cap(attempt: int) -> None:
    assert backoff_s(attempt, 0.1, 20) == min(20, 0.1 * 2 ** min(attempt, 60))


def test_a_tail_is_known_after_enough_samples_of_that_size_only() -> None:
    tail = LatencyTail()
    for number in range(LATENCY_SAMPLES - 1):
        tail.add(1000, float(number))
    assert tail.tail_s(1000) is None
    tail.add(1000, 63.0)
    assert tail.tail_s(1000) == 62.0
    assert tail.tail_s(1 << 20) is None


class Hanging(FakeSource):
    """A source whose reads last until they are interrupted."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = threading.Event()
        self.interrupted = threading.Event()

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        self.asked.set()
        assert self.interrupted.wait(WAIT_S)
        raise SourceUnavailable("interrupted")

    def interrupt(self, thread: int) -> None:
        self.interrupted.set()


def test_a_read_that_is_given_up_ends_without_another_try() -> None:
    source, errors = Hanging(), list[Exception]()
    resilient = Resilient(source)

    def read() -> None:
        try:
            resilient.read_into(X, 0, memoryview(bytearray(4)))
        except SourceUnavailable as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    assert source.asked.wait(WAIT_S)
    assert thread.ident is not None
    resilient.give_up([thread.ident, -1])
    thread.join(WAIT_S)
    assert "in time" in str(errors[0])
    assert resilient.counters.retries == 0


def test_a_pause_between_two_tries_ends_when_the_call_is_given_up() -> None:
    resilient: Resilient
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        resilient.give_up([threading.get_ident()])

    class Down(FakeSource):
        def read_into(self, *_: object) -> None:
            raise SourceUnavailable("down")

    resilient = Resilient(Down(), chance=lambda: 1.0, sleep=sleep)
    with pytest.raises(SourceUnavailable, match="in time"):
        resilient.read_into(X, 0, memoryview(bytearray(4)))
    assert len(slept) == 1
