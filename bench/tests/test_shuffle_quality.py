"""Shuffle quality of a window, and how evenly samples are left out: the tables in docs/ are current, quality has bounds."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench import shares, shuffle
from testbed import ROOT

TRAINING = ROOT / "docs" / "training.md"
MEASURED = ROOT / "docs" / "measured.md"


def test_the_table_in_the_documents_is_current() -> None:
    assert shuffle.grid().markdown().strip() in TRAINING.read_text()


@pytest.mark.slow
def test_the_table_of_shares_in_the_documents_is_current() -> None:
    assert shares.grid().markdown().strip() in MEASURED.read_text()


@settings(max_examples=2, deadline=None)
@given(st.integers(0, 2**32))
def test_a_full_shuffle_is_as_good_as_numpys_permutation(seed: int) -> None:
    found = shuffle.quality(shuffle.epoch(0, seed=seed))
    assert abs(found.position - 1) < 5 * np.sqrt(2) / (shuffle.CELLS - 1)
    assert abs(found.neighbours - 1) < 0.02
    assert abs(found.classes - 1) < 0.02


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([1, 4, 16]))
def test_a_larger_window_shuffles_better_and_a_window_ends_before_the_next_begins(
    seed: int, window: int
) -> None:
    small, large = (shuffle.epoch(size, seed=seed) for size in (window, 4 * window))
    assert np.array_equal(np.sort(small), np.arange(shuffle.EXTENTS * shuffle.EXTENT_SAMPLES))
    before, after = shuffle.quality(small), shuffle.quality(large)
    assert after.position < before.position
    assert after.neighbours > before.neighbours
    assert after.classes > before.classes
    block = small[: window * shuffle.EXTENT_SAMPLES] // shuffle.EXTENT_SAMPLES
    assert np.unique(block).size <= window + 1  # the run begins in the middle of an extent
