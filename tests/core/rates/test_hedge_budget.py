"""The budget of hedges: no more bytes than its share, and those first that are needed soonest."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.rates.hedge_budget import CLAIM_S, HEDGE_SHARE, HedgeBudget

pytestmark = pytest.mark.pure
asks = st.tuples(st.integers(1, 3), st.floats(0, 9), st.integers(1, 100), st.floats(0, 1))


@settings(max_examples=30)
@given(st.lists(st.integers(0, 10_000) | asks, max_size=60))
def test_no_more_is_asked_for_twice_than_a_share_of_what_came(
    steps: list[int | tuple[int, float, int, float]],
) -> None:
    budget, came, taken, now = HedgeBudget(), 0, 0, 0.0
    for step in steps:
        if isinstance(step, int):
            budget.earn(step)
            came += step
        else:
            process, rank, size, wait_s = step
            now += wait_s
            taken += size * budget.take(process, rank, size, now)
        assert taken <= HEDGE_SHARE * came + 1e-6


def test_a_process_whose_read_is_needed_sooner_goes_first() -> None:
    budget = HedgeBudget()
    assert not budget.take(1, 3.0, 100, now=0.0)
    budget.earn(100, share=1.0)
    assert not budget.take(2, 5.0, 100, now=0.1)
    assert budget.take(1, 3.0, 100, now=0.1)
    budget.earn(200, share=1.0)
    assert not budget.take(3, 9.0, 150, now=0.2), "another read of that size would not be left to process 2"
    assert budget.take(2, 5.0, 100, now=0.2)


def test_a_process_that_asks_no_more_holds_no_other_back() -> None:
    budget = HedgeBudget()
    assert not budget.take(1, 0.0, 100, now=0.0)
    budget.earn(100, share=1.0)
    assert budget.take(2, 5.0, 100, now=CLAIM_S)
