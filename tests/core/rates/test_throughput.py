"""Throughput over time is what counters grew by in each step."""

from __future__ import annotations

import pytest

from cachesvc.daemon.control.history import STEP_S, STEPS, ThroughputHistory

pytestmark = pytest.mark.pure


def test_rates_are_growth_by_elapsed_time() -> None:
    history = ThroughputHistory()
    assert history.next_deadline() == 0.0
    assert history.latest(10.0, (5, 7)) == (0.0, 0.0)
    history.add(100.0, (0, 1000))
    assert history.next_deadline() == 100.0 + STEP_S
    history.add(105.0, (50, 1000))
    history.add(115.0, (150, 3000))
    assert history.rates() == [(10.0, 0.0), (10.0, 200.0)]
    assert history.latest(117.0, (210, 3000)) == (160 / 12, 2000 / 12)


def test_a_counter_that_falls_is_no_negative_rate() -> None:
    history = ThroughputHistory()
    history.add(0.0, (100,))
    assert history.latest(1.0, (40,)) == (0.0,)


def test_ten_minutes_are_kept() -> None:
    history = ThroughputHistory()
    for step in range(2 * STEPS):
        history.add(step * STEP_S, (step,))
    assert len(history.rates()) == STEPS
