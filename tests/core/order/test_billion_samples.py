"""The order of 10^9 samples in 10^5 extents costs little time and memory, also after a resume."""

from __future__ import annotations

import time
import tracemalloc

import numpy as np
import pytest

from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from loader.batches.feed import SLAB

SAMPLES, EXTENTS = 10**9, 10**5
BATCH, RANKS = 4096, 64
FIRST_BATCH_S = 5.0
PEAK_BYTES = 100e6


@pytest.fixture(scope="module")
def extent_first() -> np.ndarray:
    """Uneven extents of 5,000 to 15,000 samples."""
    ends = np.sort(np.random.default_rng(0).integers(0, SAMPLES, EXTENTS - 1))
    even = np.arange(1, EXTENTS) * (SAMPLES // EXTENTS)
    return np.concatenate(([0], (ends + even) // 2, [SAMPLES])).astype(np.int64)


@pytest.mark.parametrize("window", [4, 0], ids=["auto", "all"])
@pytest.mark.parametrize("share", [0.01, 0.5, 0.99])
def test_the_first_batch_after_a_resume_comes_at_once_and_in_little_memory(
    extent_first: np.ndarray, window: int, share: float
) -> None:
    """A rank builds the epoch's order, plans its extents, and computes the slab of its first batch."""
    low, high = 5 * BATCH // RANKS, 6 * BATCH // RANKS
    tracemalloc.start()
    began = time.thread_time()
    order = EpochOrder(OrderSpec(3, BATCH, window, canonical_nodes=8 if window else 1), extent_first, 2)
    step = int(order.full_steps * share)
    plan = order.plan(low, high)
    slab = order.slots(step, min(order.full_steps, step + SLAB // (high - low)), low, high)
    taken_s = time.thread_time() - began
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert taken_s < FIRST_BATCH_S
    assert peak_bytes < PEAK_BYTES
    batch = slab[0]
    assert np.array_equal(batch, order.slots(step, step + 1, low, high)[0])
    assert np.unique(batch).size == high - low
    assert 0 <= batch.min() <= batch.max() < SAMPLES
    planned = plan.extent[(plan.first_step <= step) & (step <= plan.last_step)]
    assert set(np.searchsorted(extent_first, batch, side="right") - 1) <= set(planned)
