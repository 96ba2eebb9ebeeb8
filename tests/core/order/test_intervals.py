"""Intervals give the result of a search, also where they divide instead."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.order.intervals import Intervals

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
