"""The rate that a throttling source is asked at, and what a source that is down costs: with a virtual clock."""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field

import pytest

from cachesvc.core.backoff import Pace, full_jitter_s


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
    [
        (100, 10, 2, 64, 0.002),
        (100, 100, 2, 64, 0.02),
        (3500, 350, 16, 64, 0.03),
        (40, 1, 4, 32, 0.005),
        (1000, 100, 1, 64, 0.01),
    ],
)
def test_clients_settle_at_what_the_source_allows(
    rate: int, burst: int, clients: int, threads: int, latency_s: float
) -> None:
    asked, served = simulate(Bucket(rate, burst), clients, threads, 60, latency_s, seed=1)
    for start in (10, 20, 30, 40, 50):
        in_it = sum(start <= at < start + 10 for at in asked) / 10 / rate
        good = sum(start <= at < start + 10 for at in served) / 10 / rate
        assert in_it <= 1.1, (start, in_it)
        assert good >= 0.85, (start, good)
    assert len(asked) <= 1.1 * (rate * 60 + burst)
