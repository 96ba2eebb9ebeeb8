"""The exactly-once ledger: shards of 1 to 10,000 samples, any world, any workers, any ending."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import product
from typing import Any

import numpy as np
import pytest

from loader import DataLoader
from loader.workers.engines import WORKER_TYPES
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

WORLDS, WORKERS, ENDS = (1, 2, 3, 8), (0, 1, 4), ("drop", "pad", "error", "short")
SHARDS = (1, 10_000, 2, 77, 1, 1000, 3)
TOTAL = sum(SHARDS)
BATCH = 32


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
