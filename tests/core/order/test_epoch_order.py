"""The sample order: exactly once, elastic, planned, and shuffled as well as a permutation."""

from __future__ import annotations

import hashlib
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import (
    NEVER_ROTATED,
    EpochOrder,
    Last,
    OrderSpec,
    Plan,
    ShuffleScope,
    sample_key,
)
from cachesvc.core.order.part_layout import subset_first

ROTATED_FROM = st.sampled_from([0, 2, NEVER_ROTATED])
SCOPE: st.SearchStrategy[ShuffleScope] = st.sampled_from(["job", "node"])


@st.composite
def orders(draw: st.DrawFn) -> EpochOrder:
    counts = draw(st.lists(st.integers(0, 40), min_size=1, max_size=25))
    batch = draw(st.integers(1, 60))
    spec = OrderSpec(
        seed=draw(st.integers(0, 2**64 - 1)),
        global_batch=batch,
        window_extents=draw(st.integers(0, 6)),
        canonical_nodes=draw(st.integers(1, min(batch, 5))),
        shuffle=draw(st.booleans()),
        last=draw(st.sampled_from(["drop", "pad", "short"])),
        rotated_from=draw(ROTATED_FROM),
        shuffle_scope=draw(SCOPE),
    )
    return EpochOrder(spec, np.concatenate(([0], np.cumsum(counts))), draw(st.integers(0, 3)))


def _share(order: EpochOrder, rank: int, world: int) -> tuple[int, int]:
    batch = order.spec.global_batch
    return rank * batch // world, (rank + 1) * batch // world


def _cut(data: st.DataObject, batch: int) -> tuple[int, int]:
    """Ranks, and micro-batches of each, that divide a global batch."""
    parts = data.draw(st.sampled_from([n for n in range(1, batch + 1) if batch % n == 0]))
    world = data.draw(st.sampled_from([n for n in range(1, parts + 1) if parts % n == 0]))
    return world, parts // world


def _everything(order: EpochOrder) -> np.ndarray:
    batch = order.spec.global_batch
    full = order.slots(0, order.full_steps, 0, batch).reshape(-1)
    if not order.has_tail:
        return full
    samples, valid = order.tail(0, batch)
    return np.concatenate((full, samples[0, : valid[0]]))


@settings(max_examples=200, deadline=None)
@given(orders())
def test_every_sample_is_named_exactly_once(order: EpochOrder) -> None:
    seen = np.sort(_everything(order))
    assert np.unique(seen).size == seen.size
    dropped = order.tail_samples if order.spec.last == "drop" else 0
    assert seen.size == order.samples - dropped
    assert seen.size == 0 or (seen[0] >= 0 and seen[-1] < order.samples)


@settings(max_examples=150, deadline=None)
@given(orders(), st.integers(1, 9), st.data())
def test_global_batches_are_the_same_for_any_world_size_and_seek(
    order: EpochOrder, world: int, data: st.DataObject
) -> None:
    batch = order.spec.global_batch
    whole = order.slots(0, order.full_steps, 0, batch)
    first = data.draw(st.integers(0, order.full_steps))
    parts = [order.slots(first, order.full_steps, *_share(order, rank, world)) for rank in range(world)]
    assert np.array_equal(np.concatenate(parts, axis=1), whole[first:])


@settings(max_examples=400, deadline=None)
@given(orders(), st.data())
def test_the_last_step_has_equal_shapes_and_each_real_sample_once(
    order: EpochOrder, data: st.DataObject
) -> None:
    if not order.has_tail:
        return
    batch, samples = order.spec.global_batch, order.samples
    world, accumulate = _cut(data, batch)
    parts = world * accumulate
    tails = [order.tail(*_share(order, rank, world), accumulate) for rank in range(world)]
    shapes = {tail.samples.shape for tail in tails}
    rows = batch // parts if order.spec.last == "pad" else -(-order.tail_samples // parts)
    if (
        order.spec.by_node and order.spec.last == "short"
    ):  # each node's samples are spread over its own micro-batches
        rows = max(tail.valid.max() for tail in tails)
    assert shapes == {(accumulate, rows)}
    assert rows >= 1
    if (
        order.spec.last == "short" and not order.spec.by_node
    ):  # like DistributedSampler, and like torch's short batch on one rank
        assert order.full_steps * batch + parts * rows == -(-samples // parts) * parts
    micros = [pair for tail in tails for pair in zip(*tail, strict=True)]
    real = [sample for row, valid in micros for sample in row[:valid].tolist()]
    padding = [at >= valid for _, valid in micros for at in range(rows)]
    if not order.spec.by_node:
        assert padding == sorted(padding), (
            "repeats come last: what ranks gather is cut to the dataset's length"
        )
    whole = order.tail(0, batch)
    assert real == whole.samples[0, : whole.valid[0]].tolist(), "the same at any number of ranks"
    assert len(set(real)) == len(real) == order.tail_samples
    repeats = [sample for row, valid in micros for sample in row[valid:].tolist()]
    if len(repeats) <= samples and not order.spec.by_node:
        assert len(set(repeats)) == len(repeats)
    assert set(repeats) <= set(range(samples))


def _touches(
    order: EpochOrder, extent_first: np.ndarray, low: int, high: int, batches: int
) -> set[tuple[int, int]]:
    rows = list(order.slots(0, order.full_steps, low, high))
    if order.has_tail:
        rows.append(order.tail(low, high, batches).samples.reshape(-1))
    extents = [np.searchsorted(extent_first, row, side="right") - 1 for row in rows]
    return {(int(extent), step) for step, row in enumerate(extents) for extent in row}


def _planned(plan: Plan) -> set[tuple[int, int]]:
    return {
        (int(extent), step)
        for extent, first, last in zip(*plan[:3], strict=True)
        for step in range(first, last + 1)
    }


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=20),
    st.integers(1, 30),
    st.data(),
)
def test_the_plan_holds_what_the_slots_touch(counts: list[int], batch: int, data: st.DataObject) -> None:
    shuffle = data.draw(st.booleans())
    nodes, window = data.draw(st.integers(1, min(3, batch))), data.draw(st.integers(0, 4))
    last: Last = data.draw(st.sampled_from(["drop", "pad", "short"]))
    world, accumulate = _cut(data, batch)
    extent_first = np.concatenate(([0], np.cumsum(counts)))
    rotated_from, scope = data.draw(ROTATED_FROM), data.draw(SCOPE)
    spec = OrderSpec(1, batch, window, nodes, shuffle, last, rotated_from, shuffle_scope=scope)
    order = EpochOrder(spec, extent_first, data.draw(st.integers(0, 3)))
    rows = [*zip(*(column.tolist() for column in order.touches()), strict=True)]
    assert len(set(rows)) == len(rows)
    for rank in range(world):
        low, high = _share(order, rank, world)
        plan = order.plan(low, high, accumulate)
        touched, planned = _touches(order, extent_first, low, high, accumulate), _planned(plan)
        assert touched <= planned
        assert np.all(np.diff(plan.first_step) >= 0)
        assert plan.last_step.size == 0 or plan.last_step.max() < order.steps
        if shuffle:  # the first and last step of an interval really read from that block
            steps = {step for _, step in touched}
            assert {*plan.first_step.tolist(), *plan.last_step.tolist()} <= steps
        else:  # exact, except for steps in between that do not read the extent
            ends = {
                *zip(plan.extent, plan.first_step, strict=True),
                *zip(plan.extent, plan.last_step, strict=True),
            }
            assert ends <= touched


def test_each_canonical_node_stays_in_a_block_of_its_own_part() -> None:
    extent_first = np.arange(65) * 100
    order = EpochOrder(OrderSpec(3, 64, window_extents=4, canonical_nodes=4), extent_first, 0)
    plans = [order.plan(*_share(order, rank, 4)) for rank in range(4)]
    held = [set(plan.extent.tolist()) for plan in plans]
    assert len(set.union(*held)) == 64
    assert (
        sum(map(len, held)) <= 64 + 4
    )  # borders of parts cut four extents: one of them begins and ends the run
    for plan in plans:
        steps = np.arange(order.steps)[:, None]
        open_extents = ((plan.first_step <= steps) & (steps <= plan.last_step)).sum(axis=1)
        assert (
            open_extents.max() <= 9
        )  # two blocks at a border, one otherwise; the first has a part of an extent more
        assert open_extents.min() >= 4


def test_unshuffled_batches_are_sequential_whatever_the_canonical_nodes() -> None:
    order = EpochOrder(OrderSpec(0, 10, 2, 3, shuffle=False, last="short"), np.array([0, 7, 7, 30, 43]), 5)
    assert np.array_equal(order.slots(0, 4, 0, 10).reshape(-1), np.arange(40))
    assert order.tail(0, 10).samples.tolist() == [[40, 41, 42]]


def test_epochs_and_seeds_give_unrelated_orders() -> None:
    extent_first = np.arange(21) * 500
    found = [
        EpochOrder(OrderSpec(seed, 100), extent_first, epoch).slots(0, 100, 0, 100).reshape(-1)
        for seed in range(3)
        for epoch in range(3)
    ]
    correlations = np.asarray(np.corrcoef(np.stack(found)))[np.triu_indices(9, 1)]
    assert np.abs(correlations).max() < 0.05


def test_a_full_shuffle_spreads_like_a_numpy_permutation() -> None:
    samples, cells = 40_000, 20
    order = EpochOrder(OrderSpec(17, 100), np.concatenate((np.arange(0, samples, 130), [samples])), 2)
    for image in (_everything(order), np.random.default_rng(17).permutation(samples)):
        at = np.arange(samples) * cells // samples * cells + image * cells // samples
        table = np.bincount(at, minlength=cells * cells)
        expected, freedom = samples / cells**2, (cells - 1) ** 2
        statistic = ((table - expected) ** 2 / expected).sum()
        assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_a_subset_is_an_order_over_its_ordinals() -> None:
    extent_first, ids = np.array([0, 10, 20, 30]), np.array([1, 2, 9, 25, 29])
    first = subset_first(extent_first, ids)
    assert first.tolist() == [0, 3, 3, 5]
    order = EpochOrder(OrderSpec(1, 2, 1, last="short"), first, 0)
    assert sorted(ids[_everything(order)]) == ids.tolist()
    assert set(order.plan(0, 2).extent.tolist()) == {0, 2}


def test_an_order_is_one_fixed_function_forever() -> None:
    """Saved states name positions, so a change of these numbers breaks every resume."""
    order = EpochOrder(OrderSpec(42, 8, 2, 2), np.arange(9) * 5, 3)
    assert order.slots(1, 3, 0, 8).tolist() == [
        [37, 29, 25, 23, 30, 17, 8, 18],
        [35, 26, 21, 36, 16, 19, 34, 32],
    ]
    assert sample_key(42, 3, 17) == 16615176219843533918


@pytest.mark.parametrize(
    ("window", "digest"), [(0, "f98bb10be1b9f1af"), (1, "d36deea63467e5ca"), (4, "9485d3aab2812dfe")]
)
def test_an_order_that_is_not_rotated_is_that_of_version_3(window: int, digest: str) -> None:
    """The digests are of the program that wrote states of version 3."""
    found = hashlib.blake2b(digest_size=8)
    extent_first = np.cumsum([0, 300, 0, 77, 1, 450, 130, 65])
    lasts: tuple[Last, ...] = ("drop", "pad", "short")
    for last, nodes, epoch in product(lasts, (1, 3), (0, 5)):
        spec = OrderSpec(11, 96, window, nodes, True, last, rotated_from=6)
        order = EpochOrder(spec, extent_first, epoch)
        columns = [order.slots(0, order.full_steps, 0, 96)]
        columns += order.tail(0, 96, 4) if order.has_tail else ()
        for column in (*columns, *order.plan(0, 96, 4)[:3]):
            found.update(np.ascontiguousarray(column, np.int64).tobytes())
    assert found.hexdigest() == digest


@pytest.mark.parametrize(
    ("spec", "word"),
    [
        ({"global_batch": 0}, "global batch of 0"),
        ({"window_extents": -1}, "window of -1"),
        ({"canonical_nodes": 9}, "9 canonical nodes"),
        ({"seed": -1}, "seed -1"),
        ({"last": "keep"}, "last='keep'"),
    ],
)
def test_numbers_that_make_no_order_are_refused_in_one_line(spec: dict[str, object], word: str) -> None:
    with pytest.raises(InvalidInput, match=word):
        OrderSpec(**{"seed": 0, "global_batch": 8, **spec})  # type: ignore[arg-type]


def test_left_over_samples_are_an_error_when_asked_for() -> None:
    with pytest.raises(InvalidInput, match="leave 2 over"):
        EpochOrder(OrderSpec(0, 4, last="error"), np.array([0, 10]), 0)


def test_fewer_samples_than_micro_batches_are_repeated() -> None:
    order = EpochOrder(OrderSpec(0, 16, shuffle=False, last="short"), np.array([0, 3]), 0)
    tails = [order.tail(8 * rank, 8 * rank + 8, 4) for rank in range(2)]
    assert [tail.samples[:, 0].tolist() for tail in tails] == [[0, 1, 2, 2], [1, 0, 2, 1]]
    assert [tail.valid.tolist() for tail in tails] == [[1, 1, 1, 0], [0, 0, 0, 0]]
