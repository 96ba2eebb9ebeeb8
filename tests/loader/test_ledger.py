"""The exactly-once ledger: shards of 1 to 10,000 samples, any world, any workers, any ending."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import EpochOrder, Last, OrderSpec
from loader import DataLoader
from loader.workers.engines import WORKER_TYPES
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

WORLDS, WORKERS, ENDS = (1, 2, 3, 8), (0, 1, 4), ("drop", "pad", "error", "short")
SHARDS = (1, 10_000, 2, 77, 1, 1000, 3)
TOTAL = sum(SHARDS)
BATCH = 32


@given(
    shards=st.lists(st.integers(1, 10_000), min_size=1, max_size=12),
    world=st.sampled_from(WORLDS),
    workers=st.sampled_from(WORKERS),
    last=st.sampled_from(get_args(Last)),
    batch=st.integers(1, 64),
    window=st.integers(0, 4),
    shuffle=st.booleans(),
    draw=st.data(),
)
def test_the_order_names_every_sample_once(
    shards: list[int],
    world: int,
    workers: int,
    last: Last,
    batch: int,
    window: int,
    shuffle: bool,
    draw: st.DataObject,
) -> None:
    accumulate = draw.draw(st.integers(1, 3))
    total, parts = sum(shards), world * accumulate
    size = batch * parts
    nodes = draw.draw(st.integers(1, min(world, size)))
    spec = OrderSpec(3, size, window, nodes, shuffle, last)
    firsts = np.concatenate(([0], np.cumsum(shards)))
    if last == "error" and total % size:
        with pytest.raises(InvalidInput, match=str(total)):
            EpochOrder(spec, firsts, 0)
        return
    order = EpochOrder(spec, firsts, draw.draw(st.integers(0, 3)))
    seen: Counter[int] = Counter()
    repeats = 0
    for rank in range(world):
        low, high = rank * batch * accumulate, (rank + 1) * batch * accumulate
        steps = order.slots(0, order.full_steps, low, high)
        for worker in range(max(1, workers)):  # a worker takes whole batches in turn
            seen.update(steps[worker :: max(1, workers)].reshape(-1).tolist())
        if order.has_tail:
            for samples, valid in zip(*order.tail(low, high, accumulate), strict=True):
                assert last == "short" or len(samples) == batch
                seen.update(samples[:valid].tolist())
                repeats += len(samples) - valid
    assert set(seen.values()) <= {1}
    kept = total - total % size if last == "drop" else total
    assert len(seen) == kept
    assert order.steps == (total // size if last in ("drop", "error") else -(-total // size))
    rows = {"pad": order.steps * size, "short": -(-total // parts) * parts}
    assert repeats == rows.get(last, total) - total


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    root = tmp_path_factory.mktemp("shards")
    begin = 0
    for number, count in enumerate(SHARDS):
        datasets.array_file(
            root / "d" / f"{number}.npy", np.arange(begin, begin + count, dtype="<i8")[:, None]
        )
        begin += count
    return compiled(root / "d", root, format="records")


SAMPLE = [
    (1, 4, "pad", "process"),
    (2, 1, "drop", "process"),
    (3, 0, "short", "process"),
    (8, 0, "drop", "process"),
    (3, 1, "error", "thread"),
    (2, 4, "short", "thread"),
    (8, 4, "drop", "thread"),
]
GRID = [each for each in product(WORLDS, WORKERS, ENDS, WORKER_TYPES) if each[1] or each[3] == "process"]


@pytest.mark.parametrize(
    ("world", "workers", "last", "kind"),
    [*SAMPLE, *(pytest.param(*each, marks=pytest.mark.slow) for each in GRID if each not in SAMPLE)],
)
def test_real_loaders_hand_over_every_sample_once(
    link: MemoryLink, world: int, workers: int, last: str, kind: str
) -> None:
    """One epoch of real loaders, rank after rank."""
    size = BATCH * world
    seen: Counter[int] = Counter()
    sizes: defaultdict[int, set[int]] = defaultdict(set)
    steps, missed = set(), 0
    dataset = in_memory(link) if last != "error" else in_memory(link).take(TOTAL - TOTAL % size)
    more: dict[str, Any] = {"worker_type": kind}
    if workers and kind == "process":
        more["multiprocessing_context"] = "fork"
    for rank in range(world):
        loader = DataLoader(
            dataset,
            BATCH,
            shuffle=True,
            rank=rank,
            world_size=world,
            last=last,  # type: ignore[arg-type]
            num_workers=workers,
            window=1 << 15,
            **more,
        )
        batches = 0
        for batch in loader:
            batches += 1
            sizes[batches].add(len(batch))
            assert len(batch) == BATCH or last == "short"
            assert 0 <= loader.valid <= len(batch)
            seen.update(batch[: loader.valid, 0].tolist())
            missed += len(batch) - loader.valid
        steps.add(batches)
        assert len(loader) == batches
    assert len(steps) == 1, "unequal steps would hang a collective"
    assert all(len(found) == 1 for found in sizes.values()), "unequal shapes would break one"
    assert set(seen.values()) == {1}
    assert len(seen) == (TOTAL if last in ("pad", "short") else TOTAL - TOTAL % size)
    rows = {"pad": steps.pop() * size, "short": -(-TOTAL // world) * world}
    assert missed == rows.get(last, TOTAL) - TOTAL
