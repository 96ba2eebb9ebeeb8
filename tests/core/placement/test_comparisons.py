"""A small part of what other nodes send is compared with the source, and nothing while that is in trouble."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.comparisons import MAX_DOUBTED, PAUSE_S, Comparisons

pytestmark = pytest.mark.pure
SIZE = 64 << 20


def extent(number: int) -> ExtentId:
    return ExtentId(number.to_bytes(16, "big"))


def compared(comparisons: Comparisons, extents: int, others: int = 1) -> list[int]:
    """The numbers of the extents that are compared, of so many that come."""
    return [number for number in range(extents) if comparisons.due(extent(number), SIZE, others, 0, 0.0)]


@pytest.mark.parametrize("others", [1, 3, 7, 199])
def test_all_nodes_together_compare_one_extent_in_a_hundred(others: int) -> None:
    # Each of others + 1 nodes takes this many extents from the others, of as many as there are.
    extents = 100 * others
    assert compared(Comparisons(None), extents, others) == [extents - 1]


def test_a_share_that_is_given_holds_for_each_node() -> None:
    assert compared(Comparisons(0.25), 12, others=7) == [3, 7, 11]
    assert compared(Comparisons(1.0), 5, others=7) == [0, 1, 2, 3, 4]


def test_a_share_of_nothing_compares_nothing_not_even_what_is_doubted() -> None:
    comparisons = Comparisons(0.0)
    comparisons.doubt(extent(3))
    assert compared(comparisons, 1000) == []


def test_an_extent_that_another_node_doubts_is_compared_once() -> None:
    comparisons = Comparisons(None)
    comparisons.doubt(extent(3))
    assert compared(comparisons, 50) == [3]
    assert compared(comparisons, 20) == []


def test_the_latest_doubts_are_remembered() -> None:
    comparisons = Comparisons(None)
    for number in range(MAX_DOUBTED + 1):
        comparisons.doubt(extent(number))
    assert not comparisons.due(extent(0), 1, 1, 0, 0.0)
    assert comparisons.due(extent(MAX_DOUBTED), 1, 1, 0, 0.0)


def test_nothing_is_compared_while_the_source_throttles() -> None:
    comparisons = Comparisons(1.0)
    assert comparisons.due(extent(0), SIZE, 1, 0, 0.0)
    assert not comparisons.due(extent(1), SIZE, 1, 1, 10.0)
    assert not comparisons.due(extent(2), SIZE, 1, 1, 9.0 + PAUSE_S)
    assert comparisons.due(extent(3), SIZE, 1, 1, 10.0 + PAUSE_S)


def test_a_source_that_gave_nothing_to_compare_with_is_left_alone_for_a_while() -> None:
    comparisons = Comparisons(1.0)
    comparisons.failed(5.0)
    assert not comparisons.due(extent(0), SIZE, 1, 0, 5.0)
    assert comparisons.due(extent(1), SIZE, 1, 0, 5.0 + PAUSE_S)


@given(st.lists(st.integers(1, 1 << 30), max_size=300), st.floats(0, 1))
def test_no_more_bytes_are_compared_than_the_share(sizes: list[int], share: float) -> None:
    comparisons, came, again = Comparisons(share), 0, 0
    for number, size in enumerate(sizes):
        came += size
        again += size * comparisons.due(extent(number), size, 3, 0, 0.0)
        assert again <= share * came
