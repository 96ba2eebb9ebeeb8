"""The order that a device computes is the order of the processor."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from loader.gpu.device_order import DeviceOrder

SIZES = st.lists(st.sampled_from([0, 1, 2, 5, 100, 3000]) | st.integers(0, 1 << 40), min_size=1, max_size=20)


@given(sizes=SIZES, data=st.data())
def test_the_device_computes_the_order(sizes: list[int], data: st.DataObject) -> None:
    draw = data.draw
    batch = draw(st.integers(1, 64))
    spec = OrderSpec(
        seed=draw(st.integers(0, (1 << 64) - 1)),
        global_batch=batch,
        window_extents=draw(st.integers(0, 4)),
        canonical_nodes=draw(st.integers(1, min(batch, 4))),
        shuffle=draw(st.booleans()),
        rotated_from=draw(st.sampled_from([0, 2])),
        shuffle_scope=draw(st.sampled_from(["job", "node"])),
    )
    order = EpochOrder(spec, np.concatenate(([0], np.cumsum(sizes))), draw(st.integers(0, 3)))
    low = draw(st.integers(0, batch - 1))
    high = draw(st.integers(low + 1, batch))
    first = draw(st.integers(0, order.full_steps))
    last = min(order.full_steps, first + draw(st.integers(0, 100)))
    found = DeviceOrder(order.tables(low, high), torch.device("cpu")).samples(first, last)
    assert found.tolist() == order.slots(first, last, low, high).reshape(-1).tolist()
