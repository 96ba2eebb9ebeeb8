"""Drift of ranks is detected from counts that arrive late, and never from the delay alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.drift import Drift


def test_a_rank_is_ahead_once_its_previous_count_exceeds_a_newer_one_by_more_than_allowed() -> None:
    drift = Drift(4)
    assert drift.compare(100, 0, now=0.0) is None  # the other may have gone on since
    assert drift.compare(101, 10, now=2.0) == 0.0
    assert drift.compare(120, 10, now=4.0) == 2.0
    assert drift.compare(120, 115, now=32.0) == 30.0
    assert drift.compare(120, 116, now=34.0) is None


def test_a_rank_is_behind_at_once() -> None:
    drift = Drift(4)
    assert drift.compare(10, 15, now=0.0) == 0.0
    assert drift.compare(12, 30, now=2.0) == 2.0
    assert drift.compare(26, 30, now=4.0) is None


def test_a_rank_that_was_ahead_and_is_behind_counts_anew() -> None:
    drift = Drift(1)
    assert drift.compare(10, 20, now=0.0) == 0.0
    assert drift.compare(40, 20, now=2.0) is None
    assert drift.compare(40, 20, now=4.0) == 0.0


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
