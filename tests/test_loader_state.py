"""A run's state: small, plain, exact with batches prefetched, and at home in torch's own checkpoints."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from loader import DataLoader
from tests import datasets
from tests.loader_fakes import MemoryLink, compiled, in_memory

COUNT = 500
MAX_STATE_BYTES = 64 << 10


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    root = tmp_path_factory.mktemp("records")
    datasets.array_file(root / "r.bin", np.arange(COUNT * 512, dtype="<u4").reshape(COUNT, 512))
    return compiled(root / "r.bin", root, format="records", record_bytes=2048, extent_bytes=8192)


def loader(link: MemoryLink, **settings: object) -> DataLoader:
    return DataLoader(in_memory(link), batch_size=8, shuffle=True, window=16384, **settings)  # type: ignore[arg-type]


def rows(batches: object) -> list[list[int]]:
    return [(b.numpy().view("<u4")[:, 0] // 512).tolist() for b in batches]  # type: ignore[attr-defined]


def test_the_state_is_small_and_plain(link: MemoryLink) -> None:
    state = loader(link).state_dict()
    assert json.loads(json.dumps(state)) == state
    assert len(json.dumps(state)) < MAX_STATE_BYTES
    assert all(isinstance(value, (int, str, bool)) for value in state.values())


@pytest.mark.parametrize("depths", [(2, 2, 4), (4, 1, 2)])
def test_batches_prefetched_but_not_consumed_are_not_lost_twice_in_a_row(
    link: MemoryLink, depths: tuple[int, int, int]
) -> None:
    whole = rows(loader(link))
    taken: list[list[int]] = []
    state: dict[str, object] | None = None
    for depth, workers in zip(depths, (2, 1, 3), strict=True):
        part = loader(link, num_workers=workers, prefetch_factor=depth, multiprocessing_context="fork")
        if state is not None:
            part.load_state_dict(state)
        taken += rows(islice(part, 11))
        state = json.loads(json.dumps(part.state_dict()))
    last = loader(link)
    assert state is not None
    last.load_state_dict(state)
    assert taken + rows(last) == whole


def test_a_range_of_batches_can_be_replayed(link: MemoryLink) -> None:
    batches = loader(link)
    whole = rows(batches)
    assert batches.epoch == 1
    batches.set_epoch(0)
    batches.skip(20)
    assert rows(islice(batches, 7)) == whole[20:27]


def test_torch_checkpoints_hold_it(link: MemoryLink, tmp_path: Path) -> None:
    whole = rows(loader(link))
    first = loader(link)
    head = rows(islice(first, 9))
    model = torch.nn.Linear(2, 2)
    dcp.save({"model": model.state_dict(), "batches": first}, checkpoint_id=tmp_path / "step-9")
    second = loader(link)
    dcp.load({"model": model.state_dict(), "batches": second}, checkpoint_id=tmp_path / "step-9")
    assert head + rows(second) == whole
