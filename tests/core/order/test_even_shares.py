"""Over many epochs every sample is dropped, repeated and given to each node as often as any other."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.order.assignment import I64
from cachesvc.core.order.epoch_order import NEVER_ROTATED, EpochOrder, Last, OrderSpec

CHANCE = 1e-12
"""The chance that one count of a sample is beyond the bounds although all samples are equally likely."""


class Counts(NamedTuple):
    """How often each sample was given to each node, int64[nodes, N], left for the last batch, and repeated, int64[N]."""

    of_node: I64
    left: I64
    repeated: I64


def counted(spec: OrderSpec, extent_first: I64, epochs: range) -> Counts:
    """Count over epochs; the last batch is cut into as many micro-batches as `last` needs to have repeats."""
    batch, nodes, samples = spec.global_batch, spec.canonical_nodes, int(extent_first[-1])
    found = Counts(*(np.zeros((rows, samples), np.int64) for rows in (nodes, 1, 1)))
    for epoch in epochs:
        order = EpochOrder(spec, extent_first, epoch)
        left = np.ones(samples, np.int64)
        for node in range(nodes):
            slots = order.slots(0, order.full_steps, node * batch // nodes, (node + 1) * batch // nodes)
            found.of_node[node, slots] += 1
            left[slots] = 0
        found.left[0] += left
        if order.has_tail:
            tail = order.tail(0, batch, batch if spec.last == "short" else 1)
            repeats = tail.samples[np.arange(tail.samples.shape[1]) >= tail.valid[:, None]]
            found.repeated[0] += np.bincount(repeats, minlength=samples)
    return found


def beyond_the_bounds(counts: I64, epochs: int, share: float, chance: float) -> I64:
    """The samples whose counts no binomial distribution of `epochs` tries at `share` gives, but with `chance`: Bernstein's
    inequality."""
    variance, log = epochs * share * (1 - share), np.log(2 / chance)
    bound = log / 3 + np.sqrt(log**2 / 9 + 2 * log * variance) if variance else 0
    return np.flatnonzero(np.abs(counts - epochs * share) > bound)


def uneven(spec: OrderSpec, extent_first: I64, epochs: range, chance: float = CHANCE) -> Iterator[str]:
    """Describe each count that has samples beyond the bounds."""
    found, samples, tries = counted(spec, extent_first, epochs), int(extent_first[-1]), len(epochs)
    steps, left = divmod(samples, spec.global_batch)
    rest = (spec.global_batch - left) % spec.global_batch if spec.last != "drop" else 0
    edges = [node * spec.global_batch // spec.canonical_nodes for node in range(spec.canonical_nodes + 1)]
    shares = [steps * (end - begin) / samples for begin, end in pairwise(edges)]
    rows = [*zip(found.of_node, shares, strict=True), (found.left[0], left / samples)]
    rows.append((found.repeated[0] - tries * (rest // samples), rest % samples / samples))
    for number, (counts, share) in enumerate(rows):
        wrong = beyond_the_bounds(counts, tries, share, chance)
        if wrong.size:
            yield f"count {number}: samples {wrong[:5]} have {counts[wrong[:5]]} of {tries} x {share:.3f}"


@st.composite
def specs(draw: st.DrawFn) -> tuple[OrderSpec, I64]:
    sizes = draw(st.lists(st.sampled_from([0, 1, 2, 5, 40]) | st.integers(1, 90), min_size=1, max_size=8))
    extent_first = np.cumsum([0, *sizes])
    batch = draw(st.integers(1, 1 + int(extent_first[-1]) * 3 // 2))
    spec = OrderSpec(
        draw(st.integers(0, 2**64 - 1)),
        batch,
        draw(st.integers(0, 4)),
        draw(st.integers(1, min(batch, 4))),
        last=draw(st.sampled_from(["drop", "pad", "short"])),
    )
    return spec, extent_first


@settings(max_examples=8, deadline=None)
@given(specs())
def test_counts_stay_within_the_binomials_bounds(drawn: tuple[OrderSpec, I64]) -> None:
    spec, extent_first = drawn
    if extent_first[-1]:
        assert [*uneven(spec, extent_first, range(100))] == []


@pytest.mark.parametrize(("window", "last"), [(0, "pad"), (1, "short")])
def test_uneven_extents_have_even_shares(window: int, last: Last) -> None:
    """The bounds are four standard deviations wide here: 55 percent of a count of repeats."""
    spec = OrderSpec(4, 7, window, 2, last=last)
    assert [*uneven(spec, np.cumsum([0, 19, 1, 2, 9]), range(400), 1e-3)] == []


@pytest.mark.slow
@pytest.mark.parametrize("last", ["pad", "short"])
@pytest.mark.parametrize("window", [0, 1])
@pytest.mark.parametrize("sizes", [[31], [19, 1, 2, 9], [1] * 20 + [11], [15, 0, 16]])
def test_shares_are_even_over_thousands_of_epochs(sizes: list[int], window: int, last: Last) -> None:
    """The bounds are 20 percent of a count of repeats."""
    spec = OrderSpec(4, 7, window, 3, last=last)
    assert [*uneven(spec, np.cumsum([0, *sizes]), range(3000), 1e-4)] == []


def test_the_order_of_version_3_had_other_shares() -> None:
    """The bounds catch the case that they are for: one extent in global batches of 96, on two nodes."""
    spec = OrderSpec(4, 96, 0, 2, rotated_from=NEVER_ROTATED)
    assert len([*uneven(spec, np.array([0, 1000]), range(150))]) == 3


@pytest.mark.parametrize("sizes", [[1000], [333, 333, 334], [600, 1, 399]])
def test_the_dropped_samples_of_an_epoch_are_of_many_classes(sizes: list[int]) -> None:
    """1,000 samples, sorted by ten classes. An extent that no border cuts is dropped whole or not at all."""
    classes = []
    for epoch in range(60):
        order = EpochOrder(OrderSpec(4, 96), np.cumsum([0, *sizes]), epoch)
        kept = order.slots(0, order.full_steps, 0, 96)
        dropped = np.setdiff1d(np.arange(1000), kept)
        assert dropped.size == 40
        classes.append(np.unique(dropped // 100).size)
    of_random_samples = 9.85
    assert np.mean(classes) > (0.95 if len(sizes) == 1 else 0.3) * of_random_samples
