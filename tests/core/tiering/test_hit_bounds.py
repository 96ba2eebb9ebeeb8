"""The best hit rate of each of several claims."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.events import DatasetDeclared, Pinned
from cachesvc.core.model import RAM, DatasetId, ExtentId
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.hit_bounds import Claimed, bounds
from cachesvc.core.tiering.policy import TierSpec

sizes = st.floats(1.0, 1e12)
parts = st.floats(0.0, 1.0)
claims = st.lists(
    st.builds(lambda size, quota, pin: Claimed(size, quota * size, pin * quota * size), sizes, parts, parts),
    min_size=1,
    max_size=8,
)


@given(claims, st.floats(1.0, 1e13))
def test_bounds_fill_the_cache_and_never_more(found: list[Claimed], capacity: float) -> None:
    rates = bounds(capacity, found)
    assert all(0 <= rate <= 1 for rate in rates)
    kept = sum(rate * each.size_bytes for rate, each in zip(rates, found, strict=True))
    pinned = sum(each.pinned_bytes for each in found)
    whole = sum(each.size_bytes for each in found)
    rounding = len(found) * math.ulp(whole)  # an absolute tolerance, for capacities near zero
    assert kept == pytest.approx(max(pinned, min(capacity, whole)), rel=1e-6, abs=rounding)
    for rate, each in zip(rates, found, strict=True):
        assert rate * each.size_bytes >= each.pinned_bytes * (1 - 1e-9)


def test_a_quota_counts_where_others_want_the_room() -> None:
    assert bounds(50, [Claimed(100, 10)]) == pytest.approx([0.5]), "room that quotas leave is anybody's"
    assert bounds(50, [Claimed(100, 10), Claimed(100, 100)]) == pytest.approx([0.1, 0.4])
    assert bounds(50, [Claimed(100, 100), Claimed(100, 100, 40)]) == pytest.approx([0.1, 0.4])


def _extents(first: int, count: int) -> tuple[tuple[ExtentId, int], ...]:
    return tuple((ExtentId(number.to_bytes(16, "big")), 10) for number in range(first, first + count))


def test_the_node_reports_the_bound_under_quotas_and_pins() -> None:
    node = Node([TierSpec(RAM, 500)])
    one, other = DatasetId("one"), DatasetId("other")
    node.handle(DatasetDeclared(1, one, _extents(0, 100), 1000, 100), 0.0)
    node.handle(DatasetDeclared(2, other, _extents(100, 100), 1001), 0.0)
    assert [node.counters(each).bound for each in (one, other)] == pytest.approx([0.1, 0.4])
    node.handle(Pinned(other), 0.0)
    assert node.counters(one).bound == pytest.approx(0.1)
