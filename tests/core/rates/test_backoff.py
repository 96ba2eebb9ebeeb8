"""The rate at which a throttling source is asked, and a breaker for a source that is down, under a virtual clock."""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.rates.backoff import Pace, backoff_s
from cachesvc.sources.paces import RATE_POLL_S

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
    alone_s: float = math.inf,
) -> tuple[list[float], list[float]]:
    """The times of requests at the source, and of those that it served. Clients are closed loops with the queue and the
    retries of `Resilient`; `runs` as in `Process`. From `alone_s` on only the first one asks for more. A request is refused
    or not when it is sent, and its client knows later."""
    chance = random.Random(seed)
    processes = [Process(*runs) for _ in range(clients)]
    asked: list[float] = []
    served: list[float] = []
    events: list[tuple[float, int, Callable[[float], None]]] = []

    def later(process: Process, at: float, do: Callable[[float], None]) -> None:
        heapq.heappush(events, (process.awake(at), next(numbers), do))

    def join(process: Process, attempt: int, now: float) -> None:
        if now >= alone_s and process is not processes[0]:
            return
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
        wait_s = chance.random() * backoff_s(attempt)
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


def check_settled(
    source: Bucket | Quota,
    clients: int,
    threads: int,
    latency_s: float,
    settled_s: float,
    end_s: float,
    seeds: int = 2,
) -> None:
    """Check that a source is used from `settled_s` on, and asked for no more than it allows."""
    for seed in range(seeds):
        asked, served = simulate(replace(source), clients, threads, end_s, latency_s, seed)
        assert share(asked, settled_s, end_s, source.rate) <= 1.1, seed
        assert share(served, settled_s, end_s, source.rate) >= 0.85, seed


@pytest.mark.parametrize(
    ("source", "clients", "threads", "latency_s"),
    [
        (Bucket(100, 10), 2, 64, 0.002),
        pytest.param(Bucket(100, 10), 2, 256, 0.002, marks=pytest.mark.slow),
        pytest.param(Bucket(3500, 350), 16, 64, 0.03, marks=pytest.mark.slow),
        pytest.param(Bucket(150, 15), 2, 64, 0.005, marks=pytest.mark.slow),
        pytest.param(Bucket(1000, 100), 1, 64, 0.01, marks=pytest.mark.slow),
        (Bucket(40, 4), 2, 64, 0.02),
        (Bucket(100, 100), 2, 64, 0.02),
        (Bucket(20, 2), 1, 64, 0.02),
    ],
    ids=str,
)
def test_clients_settle_at_what_the_source_allows(
    source: Bucket, clients: int, threads: int, latency_s: float
) -> None:
    check_settled(source, clients, threads, latency_s, settled_s=10, end_s=60)


@pytest.mark.parametrize("retry_after_s", [0.5, *often(1, 2, 5, 10), 30])
@pytest.mark.parametrize(
    ("rate", "clients", "latency_s"),
    [(40, 2, 0.03), (40, 1, 0.005), pytest.param(300, 2, 0.01, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("burst_s", [*often(0.1), 1.0])
def test_a_source_that_sends_retry_after_is_used_fully(
    rate: int, clients: int, latency_s: float, retry_after_s: float, burst_s: float
) -> None:
    """A single refusal among many answers stops no other request."""
    source = Bucket(rate, rate * burst_s, retry_after_s)
    check_settled(source, clients, 64, latency_s, settled_s=10 + 1.25 * retry_after_s, end_s=120)


@pytest.mark.parametrize("clients", [1, 2, *often(4, 8)])
@pytest.mark.parametrize(
    ("rate", "window_s"),
    [
        (20, 5),
        (10, 10),
        (40, 1),
        (3, 60),
        pytest.param(100, 60, marks=pytest.mark.slow),
        pytest.param(3, 300, marks=pytest.mark.slow),
    ],
)
def test_a_quota_is_used_up(rate: int, window_s: int, clients: int) -> None:
    """A quota closes with a Retry-After until its window ends."""
    windows = max(8, 80 // window_s)
    check_settled(Quota(rate, window_s), clients, 16, 0.05, windows * window_s, 2 * windows * window_s)


@pytest.mark.parametrize(
    "source",
    [
        Quota(40, 10),
        *(
            pytest.param(source, marks=pytest.mark.slow)
            for source in (Quota(300, 10), Quota(300, 60), Bucket(300, 30), Bucket(100, 10, 5.0))
        ),
    ],
    ids=str,
)
def test_eight_nodes_share_a_source_and_one_that_is_left_has_it_all(source: Bucket | Quota) -> None:
    """Nodes do not tell each other their rates: refusals do. One that was left finds the rest in a minute."""
    asked, served = simulate(source, 8, 16, 360, 0.03, alone_s=180)
    for start, end in ((60, 180), (240, 360)):
        assert share(asked, start, end, source.rate) <= 1.1
        assert share(served, start, end, source.rate) >= 0.9


def test_a_rate_that_falls_or_rises_is_followed() -> None:
    class Changing(Bucket):
        def allows(self, now: float) -> bool:
            self.rate = 20 if 30 <= now < 90 else 200
            self.burst = self.rate / 10
            return super().allows(now)

    asked, served = simulate(Changing(200, 20), 2, 64, 200, 0.01)
    for start, end, rate in ((15, 30, 200), (40, 90, 20), (170, 200, 200)):
        assert share(asked, start, end, rate) <= 1.1, start
        assert share(served, start, end, rate) >= 0.85, start


def test_after_an_outage_the_former_rate_comes_back_soon() -> None:
    class Out(Bucket):
        def allows(self, now: float) -> bool:
            return super().allows(now) and not 30 <= now < 50

    asked, served = simulate(Out(200, 20), 2, 64, 120, 0.01)
    assert sum(32 <= at < 50 for at in asked) <= 10 * 18
    assert share(served, 60, 120, 200) >= 0.8


@pytest.mark.parametrize("latency_s", [0.1, 0.5, 1.0, 2.0, 5.0])
@pytest.mark.parametrize("threads", [64, *often(256)])
def test_late_answers_do_not_cut_the_rate_down_to_nothing(latency_s: float, threads: int) -> None:
    """A late refusal says nothing about the current rate. Before, each of them cut it, down to a fiftieth."""
    rate, settled_s = 100, 20 + 12 * latency_s
    possible = min(1.0, 2 * threads / latency_s / rate)
    asked, served = simulate(Bucket(rate, 10), 2, threads, settled_s + 100, latency_s)
    assert share(asked, settled_s, settled_s + 100, rate) <= 1.1
    assert share(served, settled_s, settled_s + 100, rate) >= 0.85 * possible


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
    places = [pace.join(1.0) for _ in range(500)]
    waited_s = pace.wait_s(places[-1], 1.0)
    before = pace.rate(3.0)
    for number in range(300):  # from here on every request is refused
        pace.refused(1.0 + number / 100, 1.01 + number / 100, 0.0)
    assert pace.rate(4.0) < before
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


def test_without_refusals_there_is_no_limit_and_a_first_guess_doubles_until_there_is_none() -> None:
    pace = Pace()
    assert [pace.wait_s(pace.join(1.0), 1.0) for _ in range(3)] == [0.0] * 3
    for sent_at in (1.0, 601.0):  # the idle time between does not count
        for _ in range(60):
            pace.accepted(sent_at, sent_at + 0.5)
    pace.refused(601.0, 601.6, 0.0)
    assert pace.rate(601.6) == pytest.approx(60, rel=0.2)
    assert pace.rate(602.6) == pytest.approx(2 * pace.rate(601.6))
    assert pace.rate(601.6 + pace.CALM_S) == math.inf


def test_a_retry_after_before_any_answer_stops_everybody() -> None:
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
