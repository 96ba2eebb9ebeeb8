"""Mixtures: closed-form counts, their inverse, proportions, and repeated components."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import OrderSpec, Touches
from cachesvc.core.order.mixture import (
    MAX_PERIOD,
    MixtureRun,
    Pattern,
    epoch_slots,
    integer_shares,
    split_spots,
)
from cachesvc.core.order.permute import permute
from cachesvc.core.order.run import RunOrder

SHARES = st.lists(st.integers(0, 60), min_size=1, max_size=7).filter(any)


class Shuffled:
    """A component's own epoch: a permutation, over extents of three samples."""

    def __init__(self, samples: int, index: int, epoch: int) -> None:
        self.size, self._key = samples, 1000 * index + epoch

    def at(self, positions: np.ndarray) -> np.ndarray:
        return permute(positions, self.size, self._key).astype(np.int64)

    def touches(self) -> list[Touches]:
        samples = self.at(np.arange(self.size))
        rows = [(s // 3, at, at + 1) for at, s in enumerate(samples.tolist())]
        return [Touches(*np.asarray(rows, np.int64).T)]


def mixed(shares: list[int], sizes: list[int], slots: int, drawn: list[int]) -> MixtureRun:
    def run_of(index: int, epoch: int) -> Shuffled:
        return Shuffled(sizes[index], index, epoch)

    return MixtureRun(Pattern(shares), slots, sizes, drawn, run_of)


@settings(max_examples=100, deadline=None)
@given(SHARES, st.integers(0, 10**12))
def test_counts_and_slots_are_closed_forms_of_the_choice(shares: list[int], seek: int) -> None:
    pattern = Pattern(shares)
    slots = np.arange(2 * pattern.period + 3)
    component, nth = pattern.choose(slots)
    for index, share in enumerate(pattern.shares):
        mine = np.flatnonzero(component == index)
        assert np.array_equal(nth[mine], np.arange(mine.size))
        assert np.count_nonzero(mine < pattern.period) == share
        assert [pattern.count(index, n) for n in range(0, slots.size, 7)] == [
            np.count_nonzero(mine < n) for n in range(0, slots.size, 7)
        ]
        if share:
            assert np.array_equal(pattern.slot(index, nth[mine]), mine)
    far, far_nth = pattern.choose(np.asarray([seek]))
    assert pattern.slot(int(far[0]), far_nth)[0] == seek
    assert pattern.count(int(far[0]), seek) == far_nth[0]


@settings(max_examples=150, deadline=None)
@given(SHARES)
def test_every_prefix_has_the_proportions_of_the_weights(shares: list[int]) -> None:
    pattern = Pattern(shares)
    component, _ = pattern.choose(np.arange(pattern.period))
    worst = 0.0
    for index, share in enumerate(pattern.shares):
        counts = np.cumsum(component == index)
        off = np.abs(counts - share / pattern.period * np.arange(1, pattern.period + 1)).max()
        worst = max(worst, float(off))
    used = [share for share in pattern.shares if share]
    assert worst <= (1 if len(used) <= 3 or len(set(used)) == 1 else 2.2) + 1e-9


def test_a_pattern_of_two_billion_slots_costs_nothing() -> None:
    pattern = Pattern([MAX_PERIOD - 78, 77, 1])
    slots = np.asarray([0, 10**9, MAX_PERIOD - 1, 5 * MAX_PERIOD + 12345])
    component, nth = pattern.choose(slots)
    found = [int(pattern.slot(c, nth[i : i + 1])[0]) for i, c in enumerate(component.tolist())]
    assert found == slots.tolist()
    assert pattern.count(1, MAX_PERIOD) == 77


@pytest.mark.parametrize(
    ("weights", "shares"),
    [([0.7, 0.3], [7, 3]), ([2, 4, 6], [1, 2, 3]), ([1e-3, 1], [1, 1000]), ([0.0, 0.2], [0, 1])],
)
def test_weights_become_the_integers_they_are_written_as(weights: list[float], shares: list[int]) -> None:
    assert integer_shares(weights) == shares


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=6).filter(any))
def test_any_weights_become_shares_in_their_proportion(weights: list[float]) -> None:
    shares = integer_shares(weights)
    assert sum(shares) <= MAX_PERIOD
    assert [share > 0 for share in shares] == [weight > 0 for weight in weights]
    assert np.allclose(np.asarray(shares) / sum(shares), np.asarray(weights) / sum(weights), atol=1e-8)


@pytest.mark.parametrize("weights", [[], [0, 0], [1, -0.1], [float("nan"), 1], [float("inf")]])
def test_weights_that_make_no_mixture_are_refused(weights: list[float]) -> None:
    with pytest.raises(InvalidInput, match="weights"):
        integer_shares(weights)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=5))
def test_an_epoch_ends_with_the_first_or_the_last_component(parts: list[tuple[int, int]]) -> None:
    pattern, sizes = Pattern([share for share, _ in parts]), [size for _, size in parts]
    first, last = (epoch_slots(pattern, sizes, size) for size in ("first", "last"))
    counts = [pattern.count(index, first) for index in range(len(sizes))]
    more = [pattern.count(index, first + 1) for index in range(len(sizes))]
    assert all(count <= size for count, size in zip(counts, sizes, strict=True))
    assert any(count > size for count, size in zip(more, sizes, strict=True))
    counts = [pattern.count(index, last) for index in range(len(sizes))]
    fewer = [pattern.count(index, last - 1) for index in range(len(sizes))]
    assert all(count >= size for count, size in zip(counts, sizes, strict=True))
    assert any(count < size for count, size in zip(fewer, sizes, strict=True))


MIXES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(MIXES, st.integers(1, 200))
def test_each_component_is_read_exactly_once_in_each_of_its_epochs(
    parts: list[tuple[int, int]], slots: int
) -> None:
    shares, sizes = [share for share, _ in parts], [size for _, size in parts]
    drawn, seen = [0] * len(sizes), []
    for _ in range(3):
        seen.append(mixed(shares, sizes, slots, drawn).at(np.arange(slots)))
        drawn = [was + Pattern(shares).count(index, slots) for index, was in enumerate(drawn)]
    spots = np.concatenate(seen)
    assert np.unique(spots).size == spots.size
    component, own_epoch, inner = split_spots(sizes, spots)
    for index, size in enumerate(sizes):
        passes = own_epoch[component == index]
        whole = (passes.size // size) * size
        assert np.array_equal(passes, np.arange(passes.size) // size)  # in turn, none twice
        samples = inner[component == index][:whole].reshape(-1, size)
        assert np.array_equal(np.sort(samples, axis=1), np.tile(np.arange(size), (len(samples), 1)))


@settings(max_examples=50, deadline=None)
@given(MIXES, st.integers(1, 90), st.integers(1, 12), st.integers(1, 3), st.integers(1, 3), st.data())
def test_the_plan_names_every_extent_in_the_steps_that_read_it(
    parts: list[tuple[int, int]], slots: int, size: int, nodes: int, world: int, data: st.DataObject
) -> None:
    accumulate = data.draw(st.integers(1, 3))
    batch = size * accumulate * world
    shares, sizes = [share for share, _ in parts], [size for _, size in parts]
    drawn = [data.draw(st.integers(0, 50)) for _ in sizes]
    spec = OrderSpec(
        1, batch, 0, min(nodes, batch), True, data.draw(st.sampled_from(["drop", "pad", "short"]))
    )
    order = RunOrder(spec, mixed(shares, sizes, slots, drawn), 0)
    for rank in range(world):
        low, high = rank * batch // world, (rank + 1) * batch // world
        touched = [(step, order.slots(step, step + 1, low, high)) for step in range(order.full_steps)]
        if order.has_tail:
            touched.append((order.full_steps, order.tail(low, high, accumulate).samples))
        plans = order.plans(low, high, accumulate)
        for step, spots in touched:
            component, _, inner = split_spots(sizes, spots.reshape(-1))
            for index, extent in zip(component.tolist(), (inner // 3).tolist(), strict=True):
                plan = plans[index]
                now = (plan.first_step <= step) & (step <= plan.last_step)
                assert extent in plan.extent[now]
