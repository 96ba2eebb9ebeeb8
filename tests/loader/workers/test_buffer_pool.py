"""Memory of dead batches is used again, but never while a view of it lives."""

from __future__ import annotations

import gc
import threading

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from loader.workers.threads import MAX_WASTE, BufferPool
from testbed import WAIT_S


def test_a_dead_batch_gives_its_block_to_the_next() -> None:
    memory = BufferPool(4)
    first = memory.empty(1000)
    home = first.ctypes.data
    del first
    again = memory.empty(1001)  # slightly larger, and still the same block
    assert again.ctypes.data == home
    assert memory.empty(1000).ctypes.data != home


def test_a_view_keeps_the_block_of_its_batch() -> None:
    memory = BufferPool(4)
    tensor = torch.from_numpy(memory.empty(800).view(np.int64).reshape(10, 10)[3:4])
    tensor.fill_(7)
    for _ in range(10):
        memory.empty(800)[:] = 0
    assert tensor.tolist() == [[7] * 10]
    view = tensor[0, :2]
    del tensor
    gc.collect()
    memory.empty(800)[:] = 0
    assert view.tolist() == [7, 7]


@given(st.lists(st.tuples(st.integers(0, 3000), st.integers(0, 9)), max_size=60), st.integers(0, 3))
def test_live_batches_never_share_memory(steps: list[tuple[int, int]], spare: int) -> None:
    memory, alive = BufferPool(spare), {}
    for number, (size, drop) in enumerate(steps):
        found = memory.empty(size)
        assert found.size == size
        found[:] = number % 251
        alive[number] = found
        del found
        alive.pop(number - drop, None)
        assert all((batch == made % 251).all() for made, batch in alive.items())


def test_a_small_batch_does_not_take_a_large_block() -> None:
    memory = BufferPool(2)
    home = memory.empty(1 << 20).ctypes.data
    assert memory.empty((1 << 20) // MAX_WASTE // 2).ctypes.data != home
    assert memory.empty(1 << 20).ctypes.data == home


def test_threads_may_share_a_pool() -> None:
    memory, wrong = BufferPool(8), []

    def work(mine: int) -> None:
        held = []
        for turn in range(2000):
            found = memory.empty(64 + turn % 40)
            found[:] = mine
            held.append(found)
            if len(held) > 3 and not (held.pop(0) == mine).all():
                wrong.append(turn)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert not wrong
