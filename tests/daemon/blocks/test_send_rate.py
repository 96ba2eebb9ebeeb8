"""The limit on bytes per second, under a clock of the test's own."""

from __future__ import annotations

from itertools import pairwise
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.daemon.blocks.replies import BURST_S, SendRate

RATE = 1000.0


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@given(st.lists(st.tuples(st.integers(1, 500), st.floats(0, 2)), min_size=1, max_size=50))
def test_no_interval_carries_more_than_its_rate_a_burst_and_one_send(sends: list[tuple[int, float]]) -> None:
    clock, sent = Clock(), []
    rate = SendRate(RATE, clock)
    for size, pause_s in sends:
        clock.now_s += pause_s
        sent.append((clock.now_s + rate.take(size), size))
    assert all(earlier[0] <= later[0] + 1e-9 for earlier, later in pairwise(sent)), "in the order of asking"
    for first, (begin_s, _) in enumerate(sent):
        for last in range(first, len(sent)):
            carried = sum(size for _, size in sent[first:last])
            assert carried <= RATE * (sent[last][0] - begin_s + BURST_S) + 1e-6


def test_senders_that_always_have_something_get_the_whole_rate() -> None:
    clock = Clock()
    rate = SendRate(RATE, clock)
    for _ in range(100):
        clock.now_s += rate.take(50)
    assert clock.now_s == pytest.approx(100 + 99 * 50 / RATE)


def test_without_a_limit_there_is_no_wait() -> None:
    rate = SendRate(inf, Clock())
    assert [rate.take(1 << 40) for _ in range(3)] == [0, 0, 0]
