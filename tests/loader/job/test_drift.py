"""Drift of ranks is detected from counts that arrive late, and never from the delay alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader.job.rank_drift import Drift


@pytest.mark.parametrize(
    ("allowed", "compared"),
    [
        # ahead once its previous count exceeds a newer one by more: before, the other may have gone on since
        (4, [(100, 0, 0, None), (101, 10, 2, 0), (120, 10, 4, 2), (120, 115, 32, 30), (120, 116, 34, None)]),
        # behind at once
        (4, [(10, 15, 0, 0), (12, 30, 2, 2), (26, 30, 4, None)]),
        # behind, then ahead: counted anew
        (1, [(10, 20, 0, 0), (40, 20, 2, None), (40, 20, 4, 0)]),
    ],
)
def test_ranks_are_apart_for_as_long_as_one_is_certainly_ahead(
    allowed: int, compared: list[tuple[int, int, float, float | None]]
) -> None:
    drift = Drift(allowed)
    assert [drift.compare(own, other, now) for own, other, now, _ in compared] == [
        each[3] for each in compared
    ]


def test_an_epoch_that_begins_anew_is_no_lead() -> None:
    drift = Drift(1)
    drift.compare(500, 500, now=0.0)
    assert drift.compare(1, 0, now=2.0) is None
    drift.forget()
    assert drift.compare(500, 0, now=4.0) is None


@given(
    st.lists(st.integers(0, 1000), min_size=2, max_size=30),
    st.lists(st.floats(0.0, 1.0), min_size=30, max_size=30),
    st.integers(0, 1),
)
def test_ranks_in_lockstep_are_never_apart_however_fast_and_late(
    steps: list[int], ages: list[float], ahead: int
) -> None:
    """Counts that arrive are at most as old as the previous comparison."""
    drift, own, before = Drift(2), 0, 0
    for at, (taken, age) in enumerate(zip(steps, ages, strict=False)):
        own += taken
        other = own - round(age * (own - before))
        assert drift.compare(own + ahead, max(0, other), now=2.0 * at) is None
        before = own
