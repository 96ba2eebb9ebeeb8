"""`shuffle_scope="node"`: each canonical node reads its own samples in all epochs, and leaves others over in each."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec

pytestmark = pytest.mark.pure


def _of_nodes(order: EpochOrder) -> list[np.ndarray]:
    """The real samples of each canonical node in an epoch."""
    batch, nodes = order.spec.global_batch, order.spec.canonical_nodes
    bounds = [node * batch // nodes for node in range(nodes + 1)]
    found = [order.slots(0, order.full_steps, low, high).reshape(-1) for low, high in pairwise(bounds)]
    if order.has_tail:
        for node, (low, high) in enumerate(pairwise(bounds)):
            samples, valid = order.tail(low, high)
            found[node] = np.concatenate((found[node], samples[0, : valid[0]]))
    return found


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=25),
    st.integers(1, 5),
    st.integers(1, 8),
    st.integers(0, 6),
    st.integers(0, 2**64 - 1),
)
def test_each_node_has_the_same_samples_in_all_epochs(
    counts: list[int], nodes: int, width: int, window: int, seed: int
) -> None:
    first = np.concatenate(([0], np.cumsum(counts)))
    spec = OrderSpec(seed, nodes * width, window, nodes, last="short", shuffle_scope="node")
    epochs = [
        [set(each.tolist()) for each in _of_nodes(EpochOrder(spec, first, epoch))] for epoch in range(3)
    ]
    assert epochs[0] == epochs[1] == epochs[2]
    sizes = [len(each) for each in epochs[0]]
    assert sum(sizes) == first[-1] == len(set.union(*epochs[0]))
    assert max(sizes) - min(sizes) <= 1, "nodes with as many slots have as many samples"
    extents = [{int(np.searchsorted(first, sample, "right")) for sample in each} for each in epochs[0]]
    owners = Counter(extent for each in extents for extent in each)
    assert sum(owners.values()) - len(owners) <= nodes - 1, "only the extents at a border have two nodes"


def test_equal_extents_belong_to_one_node_each_and_a_plan_names_no_other() -> None:
    spec = OrderSpec(5, 64, 4, 4, shuffle_scope="node")
    orders = [EpochOrder(spec, np.arange(49) * 100, epoch) for epoch in range(3)]
    for node in range(4):
        plans = [set(order.plan(16 * node, 16 * node + 16).extent.tolist()) for order in orders]
        assert plans[0] == plans[1] == plans[2]
        assert len(plans[0]) == 12


@pytest.mark.slow
def test_what_is_dropped_differs_in_each_epoch_and_is_shared_evenly() -> None:
    first, epochs = np.array([0, 7, 30, 31, 60, 95]), 2000
    spec = OrderSpec(3, 12, 1, 3, last="drop", shuffle_scope="node")
    dropped = np.zeros(95)
    for epoch in range(epochs):
        order = EpochOrder(spec, first, epoch)
        dropped[np.setdiff1d(np.arange(95), order.slots(0, 7, 0, 12))] += 1
    assert dropped.sum() == 11 * epochs
    expected = 11 / 95 * epochs
    assert np.abs(dropped - expected).max() < 6 * np.sqrt(expected) + 0.03 * expected


def test_places_invert_slots_and_the_tail() -> None:
    spec = OrderSpec(9, 10, 2, 3, last="short", shuffle_scope="node")
    order = EpochOrder(spec, np.array([0, 11, 12, 40, 58]), 4)
    for step, row in enumerate(order.slots(0, 5, 0, 10)):
        assert [order.place(int(sample)) for sample in row] == [(step, slot) for slot in range(10)]
    samples, valid = order.tail(0, 10)
    assert [order.place(int(sample)) for sample in samples[0, : valid[0]]] == [(5, row) for row in range(8)]


def test_one_node_or_no_shuffle_leaves_the_order_as_it_is() -> None:
    first = np.arange(11) * 30
    for spec in (OrderSpec(1, 8, 2, 1), OrderSpec(1, 8, 2, 4, shuffle=False)):
        whole, own = (EpochOrder(each, first, 1) for each in (spec, replace(spec, shuffle_scope="node")))
        assert np.array_equal(whole.slots(0, whole.full_steps, 0, 8), own.slots(0, own.full_steps, 0, 8))
