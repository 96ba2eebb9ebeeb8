"""Keyed permutations: exact on any domain, uniform on small ones, without structure on large ones; and intervals."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.order.intervals import Intervals
from cachesvc.core.order.permute import MAX_SIZE, mix, mix_each, permute, permute_groups


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5000), st.integers(0, 2**64 - 1))
def test_every_value_is_hit_exactly_once(size: int, key: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, key)), np.arange(size))


@pytest.mark.parametrize("size", [*range(1, 70), 2**16 - 1, 2**16, 2**16 + 1, 100_003])
def test_sizes_at_the_edges_are_bijections(size: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(size), size, 7)), np.arange(size))


@pytest.mark.parametrize("size", [2**32 - 1, 2**32 + 1, 10**12, MAX_SIZE - 1, MAX_SIZE])
def test_huge_domains_stay_inside_and_collide_nowhere(size: int) -> None:
    values = np.concatenate((np.arange(5000), size - 1 - np.arange(5000)))
    images = permute(values, size, 11)
    assert images.max() < size
    assert np.unique(images).size == values.size


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 300), min_size=1, max_size=20), st.integers(0, 2**32))
def test_groups_agree_with_one_permutation_at_a_time(sizes: list[int], seed: int) -> None:
    keys = mix_each(seed, np.arange(len(sizes)))
    together = permute_groups(
        np.concatenate([np.arange(size) for size in sizes]),
        np.repeat(np.arange(len(sizes)), sizes),
        np.array(sizes),
        keys,
    )
    alone = [permute(np.arange(size), size, int(key)) for size, key in zip(sizes, keys, strict=True)]
    assert np.array_equal(together, np.concatenate(alone))


@pytest.mark.parametrize(("size", "count"), [(2, 2), (3, 6), (4, 24), (5, 120), (6, 720)])
def test_small_domains_get_every_permutation_equally_often(size: int, count: int) -> None:
    draws = count * 100
    groups = np.repeat(np.arange(draws), size)
    keys = mix_each(mix(1, 2), np.arange(draws))
    images = permute_groups(np.tile(np.arange(size), draws), groups, np.full(draws, size), keys)
    seen = Counter(map(bytes, images.reshape(draws, size).astype(np.uint8)))
    assert len(seen) == count
    statistic = sum((found - 100) ** 2 / 100 for found in seen.values())
    assert statistic < (count - 1) + 4 * np.sqrt(2 * (count - 1))


def _chi_square(cells: np.ndarray, expected: float) -> float:
    """The chi-square statistic, in standard deviations from its mean."""
    freedom = cells.size - 1
    return float((((cells - expected) ** 2 / expected).sum() - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("size", [4096, 65_536, 100_003, 1_000_000])
def test_large_domains_look_like_numpy_permutations(size: int) -> None:
    random = np.random.default_rng(5).permutation(size)
    for image in (permute(np.arange(size), size, mix(3, 1)).astype(np.int64), random):
        grid = np.bincount((np.arange(size) * 16 // size) * 16 + image * 16 // size, minlength=256)
        steps = np.bincount((np.diff(image) % size) * 64 // size, minlength=64)
        parity = np.bincount(np.arange(size) % 8 * 8 + image % 8, minlength=64)
        assert abs(_chi_square(grid, size / 256)) < 5
        assert abs(_chi_square(steps, (size - 1) / 64)) < 5
        assert abs(_chi_square(parity, size / 64)) < 5


def test_neighbouring_keys_are_unrelated() -> None:
    size = 10_000
    images = np.stack([permute(np.arange(size), size, key) for key in range(30)]).astype(np.int64)
    correlations = np.asarray(np.corrcoef(images))[np.triu_indices(30, 1)]
    assert np.abs(correlations).max() < 5 / np.sqrt(size)


def test_the_mix_is_the_documented_one() -> None:
    assert mix(0) == 0xE220A8397B1DCDAF  # splitmix64's first output for seed 0
    assert mix(1, 2) != mix(2, 1)
    assert mix(-1) == mix(2**64 - 1)
    assert [int(h) for h in mix_each(mix(4, 5), np.arange(3))] == [mix(4, 5, part) for part in range(3)]


uneven = st.lists(st.integers(0, 50), min_size=1, max_size=30).map(sorted)
even = st.builds(
    lambda first, width, count: [first + width * number for number in range(count)],
    st.integers(0, 50),
    st.integers(0, 7),
    st.integers(1, 30),
)


@given(uneven | even, st.lists(st.integers(0, 300)))
def test_the_interval_of_a_value_is_the_last_that_begins_there_or_before(
    firsts: list[int], above: list[int]
) -> None:
    begins, values = np.array(firsts, np.int64), firsts[0] - 1 + np.array(above, np.int64)
    found = Intervals(begins).of(values)
    assert (found == np.searchsorted(begins, values, "right") - 1).all()
