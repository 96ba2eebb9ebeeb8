"""A user holds no more than its cap; the daemon's own user is bound by the total alone."""

from __future__ import annotations

import os
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from cachesvc.daemon.access.user_cap import UserCap

OWN = os.geteuid()
PER_USER, TOTAL = 5, 12


@given(st.lists(st.tuples(st.sampled_from([OWN, 64001, 64002, 64003]), st.integers(-3, 3)), max_size=60))
def test_any_order_of_takes_and_returns_keeps_to_both_limits(steps: list[tuple[int, int]]) -> None:
    cap, held = UserCap(PER_USER, TOTAL), Counter[int]()
    for uid, count in steps:
        if count >= 0:
            fits = held.total() + count <= TOTAL and (uid == OWN or held[uid] + count <= PER_USER)
            assert cap.take(uid, count) == fits
            held[uid] += count * fits
        elif held[uid] >= -count:
            cap.give_back(uid, -count)
            held[uid] += count
        assert cap.count == held.total()
