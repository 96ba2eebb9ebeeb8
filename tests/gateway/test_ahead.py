"""The gateway's read-ahead for files that are read by name."""

from __future__ import annotations

import random

import numpy as np
import pytest

from cachesvc.gateway.leased_reads import MOST, MOST_BYTES, Ahead

pytestmark = pytest.mark.pure


def fetched(reads: list[int], sizes: list[int]) -> set[int]:
    """The extents that these reads fetch, each of one extent, or that are fetched ahead of them."""
    ahead, found = Ahead(np.asarray(sizes)), set[int]()
    for extent in reads:
        found |= {extent, *(ahead.read(extent, extent) or ())}
    return found


def test_nothing_is_fetched_ahead_of_the_first_reads() -> None:
    assert fetched([4], [1] * 100) == {4}
    assert fetched([4, 5], [1] * 100) == {4, 5}


def test_reads_in_order_fetch_twice_what_was_read() -> None:
    assert fetched([4, 5, 6], [1] * 100) == set(range(4, 13))
    ahead = Ahead(np.ones(1000, int))
    plans = [ahead.read(extent, extent) for extent in range(500)]
    assert max(len(plan) for plan in plans if plan is not None) == MOST
    assert sum(plan is not None for plan in plans) < 30, "a plan is followed for a while"
    assert all(plan is None or extent + 1 in plan for extent, plan in enumerate(plans))


def test_what_is_fetched_ahead_has_bounds() -> None:
    sizes = [MOST_BYTES // 4] * 100
    assert len(fetched(list(range(20)), sizes)) <= 24
    assert fetched([97, 98, 99], [1] * 100) == {97, 98, 99}


@pytest.mark.parametrize("step", [2, 3, 7, 100])
def test_reads_that_leave_out_files_fetch_what_they_read(step: int) -> None:
    assert len(fetched(list(range(0, 10_000, step)), [1] * 10_000)) == -(-10_000 // step)


def test_reads_backwards_and_at_random_fetch_what_they_read() -> None:
    assert len(fetched(list(range(999, -1, -1)), [1] * 1000)) == 1000
    reads = random.Random(0).sample(range(100_000), 2000)
    assert len(fetched(reads, [1] * 100_000)) < 2010


def test_threads_that_read_in_order_together_are_followed() -> None:
    order, draw = list(range(1000)), random.Random(0)
    for at in range(0, 992, 8):
        order[at : at + 8] = draw.sample(order[at : at + 8], 8)
    ahead = Ahead(np.ones(1000, int))
    planned = set[int]()
    missed = 0
    for extent in order:
        missed += extent not in planned
        planned |= set(ahead.read(extent, extent) or ())
    assert missed < 200


def test_a_long_read_fetches_its_own_extents_side_by_side() -> None:
    ahead = Ahead(np.ones(1000, int))
    assert ahead.read(10, 14) == range(11, 15)
    assert ahead.read(200, 900) == range(201, 201 + MOST)
    assert ahead.read(500, 500) == range(0), "which ends elsewhere"
    assert not ahead.planned
