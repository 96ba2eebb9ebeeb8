"""The rate that a throttling source is asked at, and what a source that is down costs: with a virtual clock."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.backoff import Breaker, Pace, full_jitter_s
from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.resilient import Resilience, Resilient
from tests.test_sources_resilient import Clock


@dataclass
class Bucket:
    """A source that allows `rate` requests a second, `burst` of them at once."""

    rate: float
    burst: float
    level: float = field(init=False)
    at: float = 0.0

    def __post_init__(self) -> None:
        self.level = self.burst

    def allows(self, now: float) -> bool:
        self.level = min(self.burst, self.level + (now - self.at) * self.rate)
        self.at = now
        if self.level < 1:
            return False
        self.level -= 1
        return True


def simulate(
    bucket: Bucket, clients: int, threads: int, seconds: float, latency_s: float, seed: int
) -> tuple[list[float], list[float]]:
    """When requests came to the source, and when it served one: closed loops with the retries of `Resilient`."""
    chance = random.Random(seed)
    paces = [Pace() for _ in range(clients)]
    asked: list[float] = []
    served: list[float] = []
    events = [(chance.random() / 100, n, n % clients, 0, False) for n in range(clients * threads)]
    heapq.heapify(events)
    number = len(events)
    while events and (event := heapq.heappop(events))[0] < seconds:
        now, _, client, attempt, going = event
        number += 1
        if not going:
            heapq.heappush(events, (paces[client].reserve(now), number, client, attempt, True))
            continue
        if paces[client].paused_s(now):
            heapq.heappush(events, (now + paces[client].paused_s(now), number, client, attempt, True))
            continue
        asked.append(now)
        back = now + latency_s * (0.5 + chance.random())
        if bucket.allows(now):
            served.append(now)
            paces[client].accepted(back)
            heapq.heappush(events, (back, number, client, 0, False))
        else:
            paces[client].refused(back, 0.0)
            wait = full_jitter_s(attempt, chance.random())
            heapq.heappush(events, (back + wait, number, client, attempt + 1, False))
    return asked, served


@pytest.mark.parametrize(
    ("rate", "burst", "clients", "threads", "latency_s"),
    [(100, 10, 2, 64, 0.002), (3500, 350, 16, 64, 0.03), (150, 15, 2, 64, 0.005), (1000, 100, 1, 64, 0.01)],
)
def test_clients_settle_at_what_the_source_allows(
    rate: int, burst: int, clients: int, threads: int, latency_s: float
) -> None:
    asked, served = simulate(Bucket(rate, burst), clients, threads, 60, latency_s, seed=1)
    for start in (10, 20, 30, 40, 50):
        assert sum(start <= at < start + 10 for at in asked) / 10 / rate <= 1.1, start
        assert sum(start <= at < start + 10 for at in served) / 10 / rate >= 0.85, start
    assert len(asked) <= 1.1 * rate * 60


def test_a_source_with_a_second_of_burst_is_asked_too_much_only_while_that_lasts() -> None:
    asked, served = simulate(Bucket(100, 100), 2, 64, 100, 0.02, seed=1)
    assert len(asked) <= 1.1 * 100 * 100 + 100
    assert sum(at >= 20 for at in asked) <= 1.1 * 100 * 80
    assert sum(at >= 20 for at in served) >= 0.85 * 100 * 80


def test_without_refusals_there_is_no_limit_and_after_a_minute_it_is_forgotten() -> None:
    pace = Pace()
    assert [pace.reserve(1.0) for _ in range(3)] == [1.0] * 3
    for number in range(60):
        pace.accepted(1 + number / 100)
    pace.refused(1.6, 0.0)
    assert pace.rate(1.6) == pytest.approx(100)
    assert pace.rate(2.6) == pytest.approx(200)  # a first guess doubles
    assert pace.rate(1.6 + pace.FORGET_S + 1) == math.inf


def test_retry_after_stops_everybody() -> None:
    pace = Pace()
    pace.refused(5.0, 30.0)
    assert pace.reserve(6.0) == 35.0
    assert pace.paused_s(15.0) == 20.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 3)), max_size=200))
def test_the_rate_stays_a_rate(answers: list[tuple[bool, float]]) -> None:
    pace, now = Pace(), 0.0
    for fine, later in answers:
        now += later
        pace.accepted(now) if fine else pace.refused(now, 0.0)
        assert pace.rate(now) >= pace.LEAST_RATE
        assert pace.reserve(now) >= now


def test_a_source_that_is_down_costs_one_probe_an_interval() -> None:
    breaker, probes = Breaker(), []
    for number in range(breaker.FAILURES):
        assert breaker.ask(number / 4) == 0
        breaker.failed(number / 4)
    assert breaker.open
    now = 4.0
    while now < 64:
        if not breaker.ask(now):
            probes.append(now)
            assert breaker.ask(now) > 0  # nobody else goes
            breaker.failed(now + 0.1)
        now += 0.05
    assert len(probes) <= 4 + 60 / breaker.LIMIT_S
    assert breaker.down_s(64) == 64
    breaker.succeeded()
    assert (breaker.ask(64), breaker.down_s(64)) == (0, 0)


@given(st.lists(st.booleans(), max_size=100))
def test_a_source_that_answers_now_and_then_is_not_down(answers: list[bool]) -> None:
    breaker = Breaker()
    for number, fine in enumerate(answers):
        now = number / 10
        breaker.succeeded() if fine or number % 15 == 0 else breaker.failed(now)
        assert not breaker.open


class Dead:
    """A source that refuses connections until `until`; sixteen ask it at once."""

    def __init__(self, clock: Clock, until: float) -> None:
        self.clock, self.until, self.calls = clock, until, 0

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        raise AssertionError("not asked")

    def head(self, uri: str) -> ObjectVersion:
        self.calls += 1
        self.clock.now += 0.01
        if self.clock.now < self.until:
            raise SourceUnavailable("cannot connect to 10.0.0.1:80")
        return ObjectVersion(uri, 1, "v")

    def read_into(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        self.head(version.uri)

    def close(self) -> None:
        pass


def test_an_outage_shorter_than_the_deadline_is_waited_out_with_few_requests() -> None:
    clock = Clock()
    source = Dead(clock, until=100.0)
    patient = Resilient(source, Resilience(attempts=100), clock, lambda: 0.5, clock.sleep)
    assert patient.head("fake://x").uri == "fake://x"
    assert clock.now < 100 + Breaker.LIMIT_S + 1
    assert source.calls < 40
    assert patient.down_s == 0


def test_a_source_that_is_gone_is_one_typed_error_in_bounded_time_and_then_at_once() -> None:
    clock = Clock()
    source = Dead(clock, until=math.inf)
    patient = Resilient(source, Resilience(attempts=100, deadline_s=60), clock, lambda: 0.5, clock.sleep)
    with pytest.raises(SourceUnavailable, match="cannot connect"):
        patient.head("fake://x")
    assert clock.now <= 60
    clock.now += 30
    calls = source.calls
    for _ in range(50):
        before = clock.now
        with pytest.raises(SourceUnavailable, match=r"down for|cannot connect"):
            patient.head("fake://x")
        assert clock.now - before <= 60
    assert source.calls - calls < 50
