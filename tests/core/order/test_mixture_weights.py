"""Weights that change by step: closed-form counts, draws that follow one another, and no effect on earlier draws."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.mixture import MixtureRun, Pattern, Phases, split_spots
from cachesvc.core.order.mixture_weights import MAX_STAGES, Change, StepWeights
from tests.core.order.test_mixture import Shuffled

WEIGHTS = st.lists(st.integers(0, 9), min_size=3, max_size=3).filter(any)
SIZES = st.tuples(st.integers(1, 12), st.integers(1, 30), st.integers(1, 50))
CHANGES = st.lists(st.tuples(st.integers(1, 24), WEIGHTS, st.booleans()), max_size=3)
SPEC = OrderSpec(0, 4, last="drop")


def weights_of(sizes: Any, first: list[int], changes: Any, size: Any = "total", **more: Any) -> StepWeights:
    """Changes at ascending places, from distances between them."""
    found, at = [Change(0, tuple(first))], 0
    for distance, weights, linear in changes:
        at += distance
        found.append(Change(at, tuple(weights), linear))
    return StepWeights(sizes, size, tuple(found), **more)


def run_of(weights: StepWeights, epoch: int, spec: OrderSpec = SPEC) -> MixtureRun:
    draws, slots, taken = weights.epoch(spec, epoch)
    sizes = weights.sizes
    return MixtureRun(draws, slots, sizes, taken, lambda index, own: Shuffled(sizes[index], index, own))


def spots_of(weights: StepWeights, epochs: int, spec: OrderSpec = SPEC) -> list[np.ndarray]:
    runs = [run_of(weights, epoch, spec) for epoch in range(epochs)]
    return [run.at(np.arange(run.size)) for run in runs]


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 20), WEIGHTS), min_size=1, max_size=5),
    st.integers(0, 30),
)
def test_counts_and_slots_of_phases_are_closed_forms_of_the_choice(
    phases: list[tuple[int, list[int]]], rest: int
) -> None:
    firsts = np.cumsum([0, *(length for length, _ in phases)])
    found = Phases([(int(at), Pattern(shares)) for at, (_, shares) in zip(firsts[:-1], phases, strict=True)])
    slots = np.arange(firsts[-1] + rest)
    component, nth = found.choose(slots)
    for index in range(3):
        mine = np.flatnonzero(component == index)
        assert np.array_equal(nth[mine], np.arange(mine.size))
        assert [found.count(index, n) for n in range(slots.size + 1)] == [
            np.count_nonzero(mine < n) for n in range(slots.size + 1)
        ]
        assert np.array_equal(found.slot(index, nth[mine]), mine)
        assert [found.slots_before(index, n) for n in range(mine.size)] == mine.tolist()
        if not phases[-1][1][index]:
            assert found.slots_before(index, mine.size) is None


@settings(max_examples=50)
@given(
    SIZES, WEIGHTS, CHANGES, st.booleans(), st.sampled_from(["total", 37]), st.sampled_from(["drop", "short"])
)
def test_draws_of_a_component_follow_one_another_through_all_epochs(
    sizes: Any, first: list[int], changes: Any, by_sample: bool, size: Any, last: Any
) -> None:
    weights = weights_of(sizes, first, changes, size, by_sample=by_sample)
    spec = OrderSpec(0, 4, last=last)
    spots = np.concatenate(spots_of(weights, 4, spec))
    assert len({*spots.tolist()}) == len(spots)
    component, own_epoch, inner = split_spots(sizes, spots)
    for index, samples in enumerate(sizes):
        mine = component == index
        assert np.array_equal(own_epoch[mine], np.arange(np.count_nonzero(mine)) // samples)
        assert ((inner[mine] >= 0) & (inner[mine] < samples)).all()


@settings(max_examples=50)
@given(
    SIZES,
    WEIGHTS,
    CHANGES,
    WEIGHTS,
    st.integers(1, 30),
    st.booleans(),
    st.sampled_from(["total", 37, "once"]),
)
def test_a_change_leaves_what_was_drawn_before_it(
    sizes: Any, first: list[int], changes: Any, then: list[int], after: int, by_sample: bool, size: Any
) -> None:
    before = weights_of(sizes, first, changes, size, by_sample=by_sample)
    at = before.changes[-1].first + after
    change = Change(at, tuple(map(float, then)))
    if size == "once" and not all(
        drawn or not weight for drawn, weight in zip(before.drawn, then, strict=True)
    ):
        with pytest.raises(InvalidInput, match="had no weight so far"):
            before.changed(change)
        return
    again = before.changed(change)
    taken = at
    for epoch in range(5):
        old, new = run_of(before, epoch), run_of(again, epoch)
        assert old.size == new.size
        slots = min(old.size, max(0, taken if by_sample else taken * SPEC.global_batch))
        positions = np.arange(slots)
        assert np.array_equal(old.at(positions), new.at(positions))
        taken -= old.size if by_sample else old.size // SPEC.global_batch


@settings(max_examples=50)
@given(SIZES, WEIGHTS, WEIGHTS, st.integers(1, 2000))
def test_a_linear_change_moves_the_proportions_in_a_straight_line(
    sizes: Any, first: list[int], then: list[int], steps: int
) -> None:
    spec = OrderSpec(0, 64)
    weights = weights_of(sizes, first, [(steps, then, True)], 64 * (steps + 50))
    draws, _, _ = weights.epoch(spec, 0)
    ends = [np.asarray(each, float) / sum(each) for each in (first, then)]
    stages = min(steps, MAX_STAGES)
    for part in (0.25, 0.5, 1.0):
        slots = int(64 * steps * part)
        moved = slots / (64 * steps)
        exact = slots * (ends[0] + (ends[1] - ends[0]) * moved / 2)
        found = [draws.count(index, slots) for index in range(3)]
        assert sum(found) == slots
        off = np.abs(exact - found)
        assert (off <= 2.2 * stages + 64 * steps / stages).all()
    tail = [draws.count(index, 64 * (steps + 50)) - draws.count(index, 64 * steps) for index in range(3)]
    assert (np.abs(np.asarray(tail) - 3200 * ends[1]) <= 2.2).all()


@settings(max_examples=50)
@given(SIZES, WEIGHTS, CHANGES, st.integers(1, 7))
def test_once_reads_each_component_once_in_each_epoch(
    sizes: Any, first: list[int], changes: Any, batch: int
) -> None:
    weights = weights_of(sizes, first, changes, "once")
    spec = OrderSpec(0, batch, last="short")
    drawn = [
        size if any(each) else 0 for size, each in zip(sizes, zip(*(c.weights for c in weights.changes)))
    ]
    for epoch, spots in enumerate(spots_of(weights, 3, spec)):
        component, own_epoch, inner = split_spots(sizes, spots)
        assert np.bincount(component, minlength=3).tolist() == drawn
        assert (own_epoch == epoch).all()
        assert len({*zip(component.tolist(), inner.tolist(), strict=True)}) == sum(drawn) == weights.slots
        if epoch == 0 and not changes:  # until one drops out, slots are those of the pattern
            chosen, _ = Pattern(first).choose(np.arange(spots.size))
            ends = [np.flatnonzero(component == index)[-1] for index in range(3) if drawn[index]]
            assert np.array_equal(component[: min(ends) + 1], chosen[: min(ends) + 1])


@settings(max_examples=50)
@given(SIZES, WEIGHTS, CHANGES, st.booleans())
def test_first_ends_the_first_epoch_where_a_component_would_repeat(
    sizes: Any, first: list[int], changes: Any, by_sample: bool
) -> None:
    weights, spec = (
        weights_of(sizes, first, changes, "first", by_sample=by_sample),
        OrderSpec(0, 4, last="short"),
    )
    draws, slots, taken = weights.epoch(spec, 0)
    assert taken == [0, 0, 0]
    counts = [draws.count(index, slots) for index in range(3)]
    assert all(count <= size for count, size in zip(counts, sizes, strict=True))
    assert run_of(weights, 3, spec).size == slots <= weights.slots
    longer = weights_of(sizes, first, changes, weights.slots + 1, by_sample=by_sample)
    after, _, _ = longer.epoch(spec, 0)
    assert any(after.count(index, slots + 1) > size for index, size in enumerate(sizes))


@settings(max_examples=50)
@given(SIZES, WEIGHTS, CHANGES, st.sampled_from(["total", "once"]))
def test_the_plan_has_the_extent_of_every_sample(
    sizes: Any, first: list[int], changes: Any, size: Any
) -> None:
    run = run_of(weights_of(sizes, first, changes, size), 1)
    positions = np.arange(run.size)
    component, _, inner = split_spots(sizes, run.at(positions))
    for index, touches in enumerate(run.touches()):
        mine = component == index
        for position, extent in zip(positions[mine].tolist(), (inner[mine] // 3).tolist(), strict=True):
            held = (touches.begin <= position) & (position < touches.end)
            assert extent in touches.extent[held]


def test_a_component_of_one_sample_and_one_without_weight() -> None:
    weights = StepWeights((1, 10, 5), 3000, (Change(0, (1, 1, 0)), Change(100, (1, 0, 1))))
    run = run_of(weights, 0)
    component, own_epoch, inner = split_spots(weights.sizes, run.at(np.arange(3000)))
    alone = component == 0
    assert np.count_nonzero(alone) == 1500
    assert not inner[alone].any()
    assert np.array_equal(own_epoch[alone], np.arange(1500))
    assert [*np.unique(component[:400])] == [0, 1]
    assert [*np.unique(component[400:])] == [0, 2]


def test_places_do_not_depend_on_the_number_of_epochs_that_they_span() -> None:
    """A thousand epochs between two changes cost no more than one."""
    weights = StepWeights((7, 9), "total", (Change(0, (1, 1)), Change(4 * 10**9 + 1, (1, 3))))
    draws, slots, taken = weights.epoch(SPEC, 10**9)
    assert slots == 16
    assert taken == [8 * 10**9] * 2
    assert [draws.count(1, n) for n in (4, 8, 12, 16)] == [2, 5, 8, 11]


@pytest.mark.parametrize(
    ("size", "changes", "says"),
    [
        ("last", [], "size='last' does not go with"),
        ("total", [(0, [1, 1, 1], False)], "weights change at 0 after 0: give ascending places"),
        ("total", [(5, [0, 0, 0], False)], "give numbers of at least 0, one of them above 0"),
        ("most", [], "size='most'"),
        (0, [], "size=0"),
    ],
)
def test_wrong_weights_are_refused(size: Any, changes: Any, says: str) -> None:
    with pytest.raises(InvalidInput, match=says):
        weights_of((3, 4, 5), [1, 1, 1], changes, size)


def test_texts_name_places_and_kinds() -> None:
    weights = weights_of((3, 4, 5), [9, 1, 0], [(5, [1, 1, 1], False), (5, [1, 0, 0], True)])
    assert weights.texts == ["s0:9,1,0", "s5:1,1,1", "l10:1,0,0"]
    assert all(low.first < high.first for low, high in pairwise(weights.changes))
    assert weights_of(
        (3, 4, 5), [1, 1, 0], [(5, [1, 1, 1], True)], by_sample=True, from_start=False
    ).texts == [
        "0:1,1,0",
        "y5:1,1,1",
    ]
