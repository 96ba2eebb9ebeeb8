"""A residency map tells where a dataset's bytes are, in at most 200 cells."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.model import RAM, TierName
from cachesvc.daemon.residency import CELLS, cells

NVME = TierName("nvme0")
pytestmark = pytest.mark.pure


def test_a_small_dataset_has_a_cell_for_each_extent() -> None:
    places = [RAM, NVME, None, None]
    assert cells([10, 10, 10, 5], places, [3, 0]) == [(100, 0, 0), (0, 100, 0), (0, 0, 0), (0, 0, 100)]
    assert cells([], [], []) == []


def test_cells_weigh_extents_by_their_bytes() -> None:
    count = 2 * CELLS
    places = [RAM if index % 2 else None for index in range(count)]
    assert cells([3, 1] * CELLS, places, []) == [(25, 0, 0)] * CELLS


def test_a_part_is_neither_all_nor_nothing() -> None:
    places = [RAM] + [None] * (1000 * CELLS - 1)
    assert cells([1] * 1000 * CELLS, places, [])[:2] == [(1, 0, 0), (0, 0, 0)]
    places = [RAM] * (1000 * CELLS - 1) + [None]
    assert cells([1] * 1000 * CELLS, places, [])[-1] == (99, 0, 0)


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.sampled_from([RAM, NVME, None])), min_size=1, max_size=700)
)
def test_a_cell_is_full_only_where_all_of_it_is_here(extents: list[tuple[int, TierName | None]]) -> None:
    sizes, places = [size for size, _ in extents], [place for _, place in extents]
    found = cells(sizes, places, [])
    assert len(found) == min(CELLS, len(extents))
    assert all(ram + nvme <= 101 for ram, nvme, _ in found)
    assert all(ram == 100 for ram, _, _ in found) == all(place == RAM for place in places)
    assert any(ram for ram, _, _ in found) == any(place == RAM for place in places)
