"""Places that fail are left out, probed less and less often, and come back."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.placement.directory import SOURCE
from cachesvc.core.placement.peer_health import (
    ALONE_S,
    ALONE_UNTIL_S,
    REQUESTS_TRIP,
    THROTTLES_S,
    PlacesHealth,
)
from cachesvc.core.placement.place_search import Verdict
from cachesvc.core.placement.traits import Traits, sources
from cachesvc.core.rates.circuit_breaker import PEER_TRIP

BROKEN = Verdict("b", failure="refused", unreachable=True)
SLOW = Verdict("b", failure="late")
GOOD = Verdict("b", 64 << 20, 0.5)


def failing(verdict: Verdict, now: float = 0.0) -> PlacesHealth:
    """A node that has just failed too often."""
    health = PlacesHealth()
    for _ in range(PEER_TRIP.failures):
        assert health.begin(verdict.node, now)
        health.judge(verdict, now)
    return health


@pytest.mark.parametrize(("verdict", "state"), [(BROKEN, "unreadable"), (SLOW, "slow")])
def test_after_a_few_failures_a_node_is_left_out(verdict: Verdict, state: str) -> None:
    health = failing(verdict)
    assert health.left_out(0.0) == ["b"]
    assert not health.begin("b", 0.0)
    assert health.of("b").state(0.0) == state
    assert health.of("b").why == verdict.failure


def test_failures_of_one_node_count_for_no_other() -> None:
    health = failing(SLOW)
    assert health.begin("c", 0.0)
    assert health.begin(SOURCE, 0.0)


def test_a_slow_node_is_probed_by_one_read_and_comes_back() -> None:
    health, later = failing(SLOW), PEER_TRIP.first_s
    assert not health.begin("b", later - 1)
    assert health.left_out(later) == []
    assert health.begin("b", later)
    assert not health.begin("b", later)
    assert health.left_out(later) == ["b"]
    health.judge(GOOD, later + 1)
    assert health.left_out(later + 1) == []
    assert health.begin("b", later + 1)
    assert health.begin("b", later + 1)


def test_a_port_that_is_silent_is_not_probed_by_reads() -> None:
    health, later = PlacesHealth(), 1000 * PEER_TRIP.cap_s
    health.silent("b", "no answer", 0.0)
    assert health.left_out(later) == ["b"]
    health.answered("b", 0.001)
    assert health.left_out(later) == []
    assert health.begin("b", later)
    assert not health.begin("b", later)
    health.judge(GOOD, later)
    assert health.begin("b", later)


def test_a_port_that_answers_although_reads_break_off_does_not_bring_the_node_back() -> None:
    """A path that drops large packets and passes small ones does this."""
    health, reads, now = PlacesHealth(), 0, 0.0
    while now < 3600:
        health.answered("b", 0.001)
        if health.begin("b", now):
            reads += 1
            health.judge(BROKEN, now)
        now += 5
    assert reads <= PEER_TRIP.failures + 18


def test_the_rate_is_that_of_whole_reads() -> None:
    health = PlacesHealth()
    health.judge(GOOD, 0.0)
    health.judge(Verdict("b", 10, 5.0), 0.0)
    assert health.of("b").bytes_per_s == GOOD.size_bytes / GOOD.took_s


def test_a_node_that_starts_anew_or_leaves_is_forgotten() -> None:
    health = failing(SLOW)
    health.reset("b")
    assert health.begin("b", 0.0)
    health = failing(SLOW)
    health.forget({"c"})
    assert health.begin("b", 0.0)


@given(st.integers(0, 1 << 30), st.floats(0.0, 0.15))
def test_a_node_that_fails_now_and_then_is_rarely_left_out(seed: int, rate: float) -> None:
    chance, health, tried, now = random.Random(seed), PlacesHealth(), 0, 0.0
    for _ in range(1000):
        now += 1.0
        if health.begin("b", now):
            tried += 1
            health.judge(SLOW if chance.random() < rate else GOOD, now)
    assert tried >= 500


@given(st.lists(st.sampled_from(["read", "check ok", "check silent", "wait"]), max_size=200))
def test_what_is_left_out_cannot_begin_and_what_works_once_can(steps: list[str]) -> None:
    health, now = PlacesHealth(), 0.0
    for number, step in enumerate(steps):
        if step == "wait":
            now += 7.0
        elif step == "check ok":
            health.answered("b", 0.01)
        elif step == "check silent":
            health.silent("b", "no answer", now)
        else:
            left_out = "b" in health.left_out(now)
            assert health.begin("b", now) != left_out
            if not left_out:
                health.judge(BROKEN if number % 2 else SLOW, now)


WRONG = Verdict("b", failure="other bytes than the source has", wrong=True)
RIGHT = Verdict("b", 64 << 20, 0.5, compared=True)


def test_a_node_that_sent_wrong_bytes_is_left_out_at_once() -> None:
    health = PlacesHealth()
    health.judge(WRONG, 0.0)
    assert health.left_out(0.0) == ["b"]
    assert not health.begin("b", 0.0)
    assert (health.of("b").state(0.0), health.of("b").wrong) == ("wrong", True)


def test_only_a_read_that_was_compared_brings_it_back() -> None:
    health, now = PlacesHealth(), 0.0
    health.judge(WRONG, now)
    for again in (GOOD, WRONG, SLOW):
        now += PEER_TRIP.cap_s
        assert health.begin("b", now)
        health.judge(again, now)
        assert health.left_out(now) == ["b"]
    health.reset("b")  # it starts anew
    assert health.of("b").state(now) == "wrong"
    now += PEER_TRIP.cap_s
    assert health.begin("b", now)
    health.judge(RIGHT, now)
    assert health.left_out(now) == []
    assert (health.of("b").state(now), health.of("b").wrong) == ("works", False)


def test_reads_that_were_under_way_when_it_was_found_change_nothing() -> None:
    health = PlacesHealth()
    assert health.begin("b", 0.0)
    health.judge(WRONG, 0.0)
    health.judge(GOOD, 0.1)
    assert health.left_out(0.1) == ["b"]


def test_the_state_of_a_source_follows_its_answers() -> None:
    health, fails_s = PlacesHealth(), REQUESTS_TRIP.quiet_s
    assert health.source(0, 0, 0, 0.0) == ""
    assert health.source(100, 1, 0, 1.0) == "works"
    assert health.source(200, 2, 2, 2.0) == "throttles"
    assert health.source(200, 2, 2, 2.0 + THROTTLES_S) == "works"
    for second in range(10):
        assert health.source(200, 3 + second, 2, 20.0 + second) == "works"
    assert health.source(200, 20, 2, 20.0 + fails_s) == "fails"
    assert health.source(200, 20, 2, 90.0) == "fails", "nobody asks it now"
    assert health.left_out(90.0) == [], "it may be down for all nodes"
    assert health.source(201, 20, 2, 91.0) == "works"


def test_a_source_that_hangs_for_this_node_alone_fails() -> None:
    health, answered, late = PlacesHealth(), (100, 0, 0), Verdict(SOURCE, failure="late")
    for state in ("slow", "slow", "fails"):
        health.judge(late, 0.0)
        assert health.source(*answered, 0.0) == state
    (warning,) = sources({"a": Traits(source="works"), "b": Traits(source=state)})
    assert "the source fails at b" in warning.text
    health.judge(Verdict(SOURCE, 64 << 20, 0.5), 1.0)
    assert health.source(*answered, 1.0) == "works"


def test_one_fill_that_hung_is_enough_where_no_other_follows() -> None:
    """A member of many leads few fills, so it may be long before it asks its source again."""
    health, answered, late = PlacesHealth(), (100, 0, 0), Verdict(SOURCE, failure="late")
    health.judge(Verdict(SOURCE, 64 << 20, 0.5), 0.0)
    health.judge(late, 1.0)
    assert health.source(*answered, ALONE_S) == "slow"
    health.judge(Verdict("b", 64 << 20, 0.5), 5.0)
    assert health.source(*answered, 1.0 + ALONE_S) == "fails"
    assert health.source(*answered, 1.0 + ALONE_UNTIL_S) == "slow", "one late fill, long ago"
    assert health.left_out(1.0 + ALONE_S) == [], "the next fill asks it"
    health.judge(Verdict(SOURCE, 64 << 20, 0.5), 20.0)
    health.judge(late, 20.0 + ALONE_S)
    assert health.source(*answered, 20.0 + ALONE_S) == "slow"
