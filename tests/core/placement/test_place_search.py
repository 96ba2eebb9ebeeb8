"""How long a fill waits for a place, whom it blames, and when it may ask the source beside a node."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.limits import FILL_LATE_S
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE
from cachesvc.core.placement.place_search import (
    LATE_FACTOR,
    LEARNED_FILLS,
    MAX_NODES,
    MOST_DOUBLINGS,
    SOURCE_FACTOR,
    FillTimes,
    Hedges,
    LateRead,
    Patience,
    PlaceSearch,
    ReadEnd,
    Verdict,
)
from cachesvc.core.rates.hedge_budget import HEDGE_SHARE, HedgeBudget

SIZE = 64 << 20
X, Y = (ExtentId(bytes([number]) * 16) for number in (1, 2))
HANGS = LateRead(now=0.0, filling=True)
"""A read of a node that is fetching the extent, and has no byte of it."""
CRAWLS = LateRead(now=0.0, filling=True, came_bytes=1 << 20)
HOLDS = LateRead(now=0.0, came_bytes=1 << 10)


def usual(took_s: float) -> FillTimes:
    """The times of a cluster where fills take so long."""
    times = FillTimes()
    for _ in range(LEARNED_FILLS):
        times.add(SIZE, took_s)
    return times


def search(took_s: float = 0.0, hedges: Hedges | None = None) -> PlaceSearch:
    return PlaceSearch(SIZE, usual(took_s) if took_s else FillTimes(), hedges or Hedges())


def test_a_read_may_take_three_usual_fills() -> None:
    assert search().begin("b") == Patience(
        FILL_LATE_S
    )  # progress is enough while the usual time is not known
    assert search(0.1).begin("b") == Patience(FILL_LATE_S, FILL_LATE_S)
    assert search(20.0).begin("b") == Patience(60.0, 60.0)
    assert search(20.0).begin(SOURCE) == Patience(60.0 * SOURCE_FACTOR)  # its progress is progress enough


@given(st.lists(st.floats(0.01, 100), min_size=LEARNED_FILLS, max_size=200))
def test_single_slow_fills_move_the_usual_time_little(took: list[float]) -> None:
    times = FillTimes()
    for each in took:
        times.add(SIZE, each)
    assert FILL_LATE_S <= times.late_s(SIZE) <= max(FILL_LATE_S, LATE_FACTOR * max(took[-64:]))
    assert times.limit_s(SIZE) == times.late_s(SIZE)
    assert times.limit_s(SIZE // 4) == math.inf  # of another size nothing is known


def test_a_late_node_is_blamed_once_another_place_was_in_time() -> None:
    fill = search(1.0)
    fill.begin("b")
    fill.late_at("b", "it waits", HANGS)
    assert (fill.failed, fill.late) == ([], ["b"])
    fill.begin(SOURCE)
    assert fill.gave(SOURCE, False, 0, 0.9) == [Verdict(SOURCE, 0, 0.9), Verdict("b", failure="it waits")]


def test_no_node_is_blamed_where_the_source_is_slow_for_all() -> None:
    fill = search(1.0)
    fill.late_at("b", "it waits", HANGS)
    fill.late_at(SOURCE, "it waits", LateRead(0.0))
    fill.begin(SOURCE)
    assert fill.gave(SOURCE, False, 0, FILL_LATE_S + 1) == [Verdict(SOURCE, 0, FILL_LATE_S + 1)]


def test_a_source_that_fails_is_blamed_once_a_node_gave_the_extent() -> None:
    fill = search(1.0)
    assert fill.failed_at(SOURCE, "403", ReadEnd.FAILED) == []
    assert fill.failed == [SOURCE]
    assert fill.gave("b", True, SIZE, 1.0) == [Verdict("b", SIZE, 1.0), Verdict(SOURCE, failure="403")]


def test_a_node_that_breaks_off_is_blamed_at_once_and_one_that_lacks_the_extent_is_not() -> None:
    fill = search()
    assert fill.failed_at("b", "refused", ReadEnd.FAILED) == [
        Verdict("b", failure="refused", unreachable=True)
    ]
    assert fill.failed_at("c", "not here", ReadEnd.LACKS) == []
    assert fill.failed == ["b", "c"]


def test_a_node_that_is_late_twice_has_failed() -> None:
    fill = search()
    fill.late_at("b", "slow", HOLDS)
    assert fill.failed == []
    fill.late_at("b", "slow", HOLDS)
    assert fill.failed == ["b"]


def test_the_source_is_asked_again_once_all_nodes_are_late() -> None:
    fill = search()
    fill.late_at(SOURCE, "silent", LateRead(0.0))
    assert SOURCE in fill.late
    fill.late_at("b", "silent", HANGS)
    assert fill.late == ["b"]


@given(st.lists(st.sampled_from(["b", "c", SOURCE]), max_size=40), st.booleans())
def test_every_search_ends_at_the_source(late: list[str], crawl: bool) -> None:
    fill, waited_s = search(1.0), 0.0
    for node in late:
        patience = fill.begin(node)
        if fill.exhausted:
            assert patience == Patience()
            break
        waited_s += patience.wait_s
        fill.late_at(node, "late", HOLDS if crawl else HANGS)
    assert waited_s <= (MAX_NODES + 1) * FILL_LATE_S * 2**MOST_DOUBLINGS


def test_a_node_that_has_nothing_costs_no_hedge() -> None:
    fill = search()
    fill.late_at("b", "it waits", HANGS)
    assert fill.hedging
    fill.begin(SOURCE)
    assert not fill.hedging


def test_a_node_that_crawls_is_followed_on_where_hedges_are_spent() -> None:
    fill = search(1.0)
    fill.late_at("b", "slow", CRAWLS)
    assert not fill.late
    assert not fill.hedging
    assert fill.begin("b") == Patience(2 * FILL_LATE_S, 2 * FILL_LATE_S)


def test_a_node_that_holds_the_extent_is_left_whatever_hedges_are_left() -> None:
    fill = search()
    fill.late_at("b", "slow", HOLDS)
    assert fill.late == ["b"]
    assert not fill.hedging


@pytest.mark.parametrize("throttled", [False, True])
def test_none_is_hedged_while_the_source_throttles(throttled: bool) -> None:
    hedges = Hedges(HedgeBudget(left_bytes=SIZE))
    late = LateRead(100.0, filling=True, came_bytes=1, throttled=throttled)
    assert hedges.allows(SIZE, late, FILL_LATE_S) != throttled


def test_none_is_hedged_while_the_source_gives_this_node_nothing() -> None:
    hedges = Hedges()
    hedges.began(X, 0.0)
    late = LateRead(FILL_LATE_S, filling=True)
    assert not hedges.allows(SIZE, late, FILL_LATE_S)
    hedges.moved(Y, FILL_LATE_S - 1)  # from a node
    assert not hedges.allows(SIZE, late, FILL_LATE_S)
    hedges.moved(X, FILL_LATE_S - 1)
    assert hedges.allows(SIZE, late, FILL_LATE_S)
    hedges.ended(X, False, FILL_LATE_S)
    assert hedges.allows(
        SIZE, LateRead(100.0, filling=True), FILL_LATE_S
    )  # nothing is asked of it: nothing is known


@given(st.lists(st.booleans(), max_size=300))
def test_bytes_that_come_twice_are_within_their_share(fetched: list[bool]) -> None:
    budget, whole, twice = HedgeBudget(), 0, 0
    hedges = Hedges(budget)
    for number, fetch in enumerate(fetched):
        if fetch:
            budget.earn(SIZE)
            whole += SIZE
        elif hedges.allows(SIZE, LateRead(number, filling=True, came_bytes=1), FILL_LATE_S):
            budget.spend(SIZE)
            twice += SIZE
    assert twice <= HEDGE_SHARE * whole
