"""The rate at which a throttling source is asked, and the cost of a source that is down, under a virtual clock."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.backoff import Pace, SourceBreaker, full_jitter_s
from cachesvc.sources.resilient import RATE_POLL_S, Resilience, Resilient
from cachesvc.sources.source import OnReceived, ignore_received
from tests.support.clock import Clock

LATE_S = 0.005
"""The most by which a sleeping thread wakes up late."""


@dataclass
class Bucket:
    """A source that allows `rate` requests a second, `burst` of them at once."""

    rate: float
    burst: float
    retry_after_s: float = 0.0
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

    def closed_s(self, now: float) -> float:
        """The Retry-After of a refusal."""
        return self.retry_after_s


@dataclass
class Quota:
    """A source that allows `rate` requests a second on average, at any time in a window of `window_s`."""

    rate: float
    window_s: float
    window: int = 0
    asked: int = 0

    def allows(self, now: float) -> bool:
        if int(now // self.window_s) != self.window:
            self.window, self.asked = int(now // self.window_s), 0
        self.asked += 1
        return self.asked <= self.rate * self.window_s

    def closed_s(self, now: float) -> float:
        return self.window_s - now % self.window_s


@dataclass
class Process:
    """A client: its pace, and when it has a core (always, or the first `runs_s` of every `of_s` seconds)."""

    runs_s: float
    of_s: float
    pace: Pace = field(default_factory=Pace)

    def awake(self, at: float) -> float:
        return at if at % self.of_s < self.runs_s else at - at % self.of_s + self.of_s


def simulate(
    source: Bucket | Quota,
    clients: int,
    threads: int,
    seconds: float,
    latency_s: float,
    seed: int = 1,
    runs: tuple[float, float] = (1.0, 1.0),
) -> tuple[list[float], list[float]]:
    """The times of requests at the source, and of those that it served. Clients are closed loops with the queue and the
    retries of `Resilient`; `runs` as in `Process`. A request is refused or not when it is sent, and its client knows
    later."""
    chance = random.Random(seed)
    processes = [Process(*runs) for _ in range(clients)]
    asked: list[float] = []
    served: list[float] = []
    events: list[tuple[float, int, Callable[[float], None]]] = []

    def later(process: Process, at: float, do: Callable[[float], None]) -> None:
        heapq.heappush(events, (process.awake(at), next(numbers), do))

    def join(process: Process, attempt: int, now: float) -> None:
        stand(process, attempt, process.pace.join(now), now)

    def stand(process: Process, attempt: int, place: float, now: float) -> None:
        if wait_s := process.pace.wait_s(place, now):
            wakes_at = now + min(wait_s, RATE_POLL_S) + chance.random() * LATE_S
            return later(process, wakes_at, partial(stand, process, attempt, place))
        asked.append(now)
        back = now + latency_s * (0.5 + chance.random())
        if source.allows(now):
            served.append(now)
            return later(process, back, partial(accepted, process, now))
        later(process, back, partial(refused, process, attempt, now, source.closed_s(now)))

    def accepted(process: Process, sent_at: float, now: float) -> None:
        process.pace.accepted(sent_at, now)
        join(process, 0, now)

    def refused(process: Process, attempt: int, sent_at: float, retry_after_s: float, now: float) -> None:
        process.pace.refused(sent_at, now, retry_after_s)
        wait_s = full_jitter_s(attempt, chance.random())
        if attempt:
            wait_s = max(wait_s, retry_after_s * (1 + 0.25 * chance.random()))
        later(process, now + wait_s, partial(join, process, attempt + 1))

    numbers = count()
    for number in range(clients * threads):
        process = processes[number % clients]
        later(process, chance.random() / 100, partial(join, process, 0))
    while events and events[0][0] < seconds:
        now, _, do = heapq.heappop(events)
        do(now)
    return asked, served


def often(*values: float) -> list[object]:
    """Slow parameters, for `make chaos`."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


def share(times: list[float], start: float, end: float, rate: float) -> float:
    """The rate of `times` between two moments, as a part of `rate`."""
    return sum(start <= at < end for at in times) / (end - start) / rate


@pytest.mark.parametrize(
    ("rate", "burst", "clients", "threads", "latency_s"),
    [
        (100, 10, 2, 64, 0.002),
        (100, 10, 2, 256, 0.002),
        pytest.param(3500, 350, 16, 64, 0.03, marks=pytest.mark.slow),
        (150, 15, 2, 64, 0.005),
        (1000, 100, 1, 64, 0.01),
    ],
)
def test_clients_settle_at_what_the_source_allows(
    rate: int, burst: int, clients: int, threads: int, latency_s: float
) -> None:
    asked, served = simulate(Bucket(rate, burst), clients, threads, 60, latency_s)
    for start in (10, 20, 30, 40, 50):
        assert share(asked, start, start + 10, rate) <= 1.1, start
        assert share(served, start, start + 10, rate) >= 0.85, start
    assert len(asked) <= 1.15 * rate * 60


@pytest.mark.parametrize("latency_s", [0.002, 0.005, 0.02])
def test_a_slow_source_is_used_from_the_fifth_second_on(latency_s: float) -> None:
    """A regression: all places in the queue looked at the same moments, asked at once when their turn had come early, and
    were refused. The rate was halved, and took 20 s to come back."""
    rate = 40
    for seed in range(6):
        asked, served = simulate(Bucket(rate, 4), 2, 64, 30, latency_s, seed)
        assert share(asked, 5, 30, rate) <= 1.1, seed
        assert share(served, 5, 30, rate) >= 0.95, seed


@pytest.mark.parametrize("retry_after_s", [0.5, *often(1, 2, 5, 10), 30])
@pytest.mark.parametrize(("rate", "clients", "latency_s"), [(40, 2, 0.03), (40, 1, 0.005), (300, 2, 0.01)])
@pytest.mark.parametrize("burst_s", [*often(0.1), 1.0])
def test_a_source_that_sends_retry_after_is_used_fully(
    rate: int, clients: int, latency_s: float, retry_after_s: float, burst_s: float
) -> None:
    """A regression: one refusal among many answers stopped all requests, and the rate grew meanwhile, or while clients that
    were refused twice stayed away. Then many were refused, for 30 s, and so on."""
    for seed in range(2):
        source = Bucket(rate, rate * burst_s, retry_after_s)
        asked, served = simulate(source, clients, 64, 120, latency_s, seed)
        start = 5 + 1.25 * retry_after_s
        assert share(served, start, start + 30, rate) >= 0.85, seed
        assert share(served, start, 120, rate) >= 0.95, seed
        assert share(asked, start + 5, 120, rate) <= 1.1, seed
        assert len(asked) <= 1.15 * len(served)


@pytest.mark.parametrize("window_s", [1, *often(5, 10), 60])
@pytest.mark.parametrize(
    ("rate", "latency_s"), [(40, 0.01), (100, 0.1), pytest.param(300, 0.01, marks=pytest.mark.slow)]
)
def test_a_quota_is_used_up_evenly(rate: int, latency_s: float, window_s: float) -> None:
    """Each window has a few refusals in a row. Before, they were up to a fifth of the requests."""
    for seed in range(2):
        asked, served = simulate(Quota(rate, window_s), 2, 64, 240, latency_s, seed)
        assert share(asked, 120, 240, rate) <= 1.1, seed
        assert share(served, 120, 240, rate) >= 0.85, seed
        assert len(asked) <= 1.1 * len(served)


@pytest.mark.parametrize("clients", [1, *often(2), 4, *often(8)])
@pytest.mark.parametrize(
    ("rate", "window_s"),
    [(20, 5), (10, 10), (20, 10), (3, 60), (5, 60), pytest.param(3, 300, marks=pytest.mark.slow)],
)
def test_a_small_quota_is_used_up_evenly_by_many(rate: int, window_s: int, clients: int) -> None:
    """A regression: each client was refused eight times a window, and the rate grew over seconds. A quota of 100 requests
    was used up long before its window ended, and up to 1.21 times as many were asked for."""
    for seed in range(2):
        asked, served = simulate(Quota(rate, window_s), clients, 16, 16 * window_s, 0.05, seed)
        start, end = 8 * window_s, 16 * window_s
        assert share(asked, start, end, rate) <= 1.1, seed
        assert share(served, start, end, rate) >= 0.85, seed
        if clients == 1:
            halves = range(int(start), int(end), window_s // 2 or 1)
            assert all(share(served, at, at + window_s / 2, rate) > 0.5 for at in halves), seed


@pytest.mark.parametrize("burst", [1, 2])
def test_a_source_without_burst_capacity_is_used_by_one_pace(burst: int) -> None:
    """Several paces share such a source badly: with a burst of two, four were served 0.63 of the rate, with one, 0.2."""
    for seed in range(4):
        asked, served = simulate(Bucket(20, burst), 1, 64, 90, 0.02, seed)
        assert share(served, 20, 90, 20) >= 0.85, seed
        assert share(asked, 20, 90, 20) <= 1.1, seed


def test_a_first_guess_that_was_too_low_is_corrected_by_what_was_served_until_the_pause() -> None:
    """A regression: the guess was cut by half though more had been served, so 0.6 of the quota was used for 20 s."""
    for seed in range(4):
        asked, served = simulate(Quota(20, 1), 1, 100, 27, 0.02, seed)
        assert share(served, 7, 27, 20) >= 0.85, seed
        assert share(asked, 7, 27, 20) <= 1.1, seed


def test_a_quota_that_was_forgotten_slows_no_first_guess() -> None:
    pace, now = Pace(), 0.0
    for used_s in range(10, 16):  # 100 a minute, later in each
        for number in range(100):
            pace.accepted(now, now + number * used_s / 100)
        for number in range(2 * Pace.CLOSED):
            pace.refused(now + used_s, now + used_s + number / 100, 60.0 - used_s - number / 100)
        now += 60
    assert pace.rate(now + 60) < 5
    now += 60 * Pace.FORGET_S
    assert math.isinf(pace.rate(now))
    pace.accepted(now, now)
    pace.refused(now, now + 1, 0.0)
    assert pace.rate(now + 2) == pytest.approx(2 * pace.rate(now + 1))


def test_an_unused_first_guess_does_not_grow() -> None:
    """A regression: it doubled every second while refused clients stayed away, and was then cut by half every 30 s."""
    for seed in range(10, 14):
        asked, served = simulate(Bucket(40, 40, 30), 1, 64, 180, 0.005, seed)
        assert share(served, 100, 180, 40) >= 0.85, seed
        assert share(asked, 100, 180, 40) <= 1.1, seed


@pytest.mark.parametrize("latency_s", [0.1, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("threads", [64, *often(256)])
def test_late_answers_do_not_cut_the_rate_down_to_nothing(latency_s: float, threads: int) -> None:
    """A late refusal says nothing about the current rate. Before, each of them cut it, down to a fiftieth."""
    rate = 100
    possible = min(1.0, 2 * threads / latency_s / rate)
    asked, served = simulate(Bucket(rate, 10), 2, threads, 120, latency_s)
    assert share(asked, 20, 120, rate) <= 1.1
    assert share(served, 20, 120, rate) >= 0.85 * possible


@pytest.mark.parametrize("runs", [(0.05, 0.5), (0.1, 1.0), (0.2, 2.0), (0.5, 5.0)])
def test_processes_that_seldom_have_a_core_make_progress(runs: tuple[float, float]) -> None:
    """They ask in bursts whenever they have a core; the source serves a burst each time."""
    rate, burst = 100, 10
    asked, served = simulate(Bucket(rate, burst), 2, 64, 180, 0.01, runs=runs)
    for start in range(20, 180, 40):
        assert share(served, start, start + 40, burst / runs[1]) >= 0.9, start
        assert share(asked, start, start + 40, rate) <= 1.1, start


def test_a_cut_delays_the_whole_queue() -> None:
    pace = Pace()
    for number in range(100):
        pace.accepted(0.0, number / 100)
    pace.refused(0.0, 1.0, 0.0)
    assert pace.rate(1.0) == pytest.approx(100)
    places = [pace.join(1.0) for _ in range(500)]
    waited_s = pace.wait_s(places[-1], 1.0)
    for number in range(300):  # from here on every request is refused
        pace.refused(1.0 + number / 100, 1.01 + number / 100, 0.0)
    assert pace.rate(4.0) < 60
    assert pace.wait_s(places[-1], 4.0) > waited_s - 3 + 1


@given(st.floats(0.001, 100), st.integers(1, 64), st.data())
def test_each_place_in_the_queue_is_served_in_bounded_time(
    served: float, line: int, data: st.DataObject
) -> None:
    """Each place takes at most the time that the least rate gives it, with any answers."""
    pace = Pace()
    pace.accepted(0.0, served)
    pace.refused(0.0, 0.1 + served, 0.0)
    pace.refused(0.0, 0.4 + served, 0.0)
    now = start = 0.4 + served
    place = [pace.join(now) for _ in range(line)][-1]
    while wait_s := pace.wait_s(place, now):
        now += min(wait_s, RATE_POLL_S)
        if data.draw(st.booleans()):
            pace.refused(now - 0.01, now, 0.0)
        assert now - start <= 2 + line / pace.LEAST_RATE


def test_a_source_with_a_second_of_burst_is_asked_too_much_only_while_that_lasts() -> None:
    asked, served = simulate(Bucket(100, 100), 2, 64, 100, 0.02)
    assert len(asked) <= 1.15 * 100 * 100
    assert sum(at >= 20 for at in asked) <= 1.1 * 100 * 80
    assert sum(at >= 20 for at in served) >= 0.85 * 100 * 80


def test_without_refusals_there_is_no_limit_and_after_a_minute_it_is_forgotten() -> None:
    pace = Pace()
    assert [pace.wait_s(pace.join(1.0), 1.0) for _ in range(3)] == [0.0] * 3
    for number in range(60):
        pace.accepted(1.0, 1 + number / 100)
    pace.refused(1.0, 1.6, 0.0)
    assert pace.rate(1.6) == pytest.approx(100)
    assert pace.rate(2.6) == pytest.approx(200)  # a first guess doubles
    assert pace.rate(1.6 + pace.FORGET_S + 1) == math.inf


def test_a_first_guess_does_not_count_idle_time() -> None:
    pace = Pace()
    for sent_at in (1.0, 601.0):
        for number in range(60):
            pace.accepted(sent_at, sent_at + number / 100)
    pace.refused(601.0, 601.6, 0.0)
    assert pace.rate(601.6) == pytest.approx(100)


def test_retry_after_stops_everybody() -> None:
    pace = Pace()
    pace.refused(4.0, 5.0, 30.0)
    assert pace.wait_s(pace.join(6.0), 6.0) == 29.0
    assert pace.paused_s(15.0) == 20.0


@given(st.lists(st.tuples(st.booleans(), st.floats(0.001, 3)), max_size=200))
def test_the_rate_stays_a_rate(answers: list[tuple[bool, float]]) -> None:
    pace, now = Pace(), 0.0
    for fine, later in answers:
        now += later
        pace.accepted(now, now) if fine else pace.refused(now, now, 0.0)
        assert pace.rate(now) >= pace.LEAST_RATE
        assert pace.wait_s(pace.join(now), now) >= 0


def test_a_source_that_is_down_costs_one_probe_an_interval() -> None:
    breaker, probes = SourceBreaker(), []
    for number in range(breaker.FAILURES):
        assert breaker.ask(number / 3) == 0
        breaker.failed(number / 3)
    assert breaker.open
    now = 4.0
    while now < 64:
        if not breaker.ask(now):
            probes.append(now)
            assert breaker.ask(now) > 0  # no other request is sent
            breaker.failed(now + 0.1)
        now += 0.05
    assert len(probes) <= 4 + 60 / breaker.LIMIT_S
    assert breaker.down_s(64) == 64
    breaker.succeeded()
    assert (breaker.ask(64), breaker.down_s(64)) == (0, 0)


@given(st.lists(st.booleans(), max_size=100))
def test_a_source_that_answers_now_and_then_is_not_down(answers: list[bool]) -> None:
    breaker = SourceBreaker()
    for number, fine in enumerate(answers):
        now = number / 10
        breaker.succeeded() if fine or number % 15 == 0 else breaker.failed(now)
        assert not breaker.open


class Dead:
    """A source that refuses connections until `until`."""

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

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        self.head(version.uri)

    def checker(self, version: ObjectVersion) -> None:
        pass

    def close(self) -> None:
        pass


def test_an_outage_shorter_than_the_deadline_is_waited_out_with_few_requests() -> None:
    clock = Clock()
    source = Dead(clock, until=100.0)
    patient = Resilient(source, Resilience(), clock, lambda: 0.5, clock.sleep)
    assert patient.head("fake://x").uri == "fake://x"
    assert clock.now < 100 + SourceBreaker.LIMIT_S + 1
    assert source.calls < 40


def test_a_source_that_is_gone_is_one_typed_error_in_bounded_time_and_then_at_once() -> None:
    clock = Clock()
    source = Dead(clock, until=math.inf)
    patient = Resilient(source, Resilience(deadline_s=60), clock, lambda: 0.5, clock.sleep)
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
