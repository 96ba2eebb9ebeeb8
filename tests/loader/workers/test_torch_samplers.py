"""torch's samplers over a dataset of `open_dataset`: their order is kept, and becomes a plan for the daemon."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
)
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data.distributed import DistributedSampler

from cachesvc.client.control import Control
from loader import DataLoader, Dataset, open_dataset
from loader.workers.torch_samplers import plan_of
from testbed.node import Daemon
from tests.support.waiting import wait_until

RECORD, EACH, EXTENTS = 1024, 64, 24
"""Bytes per record, records per extent, extents."""
COUNT = EACH * EXTENTS


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Record n begins with n."""
    root = tmp_path_factory.mktemp("foreign")
    rows = np.zeros((COUNT, RECORD // 8), "<i8")
    rows[:, 0] = np.arange(COUNT)
    rows.tofile(root / "records.bin")
    options = ["--ram", "64MiB", "--extent-bytes", str(EACH * RECORD), "--allow", f"{root}/"]
    with Daemon(root / "node", options) as daemon:
        yield daemon


@pytest.fixture
def data(node: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dataset]:
    monkeypatch.setenv("CACHESVC_SOCKET", node.socket_dir)
    monkeypatch.setenv("CACHESVC", "require")
    opened = open_dataset(node.root.parent / "records.bin", format="records", record_bytes=RECORD)
    yield opened
    opened.opened.close()


def numbers(batches: TorchLoader[torch.Tensor]) -> list[list[int]]:
    return [torch.stack(list(batch)).view(torch.int64)[:, 0].tolist() for batch in batches]


SAMPLERS: dict[str, Callable[[Dataset], Sampler[int]]] = {
    "in order": lambda data: SequentialSampler(data),
    "shuffled": lambda data: RandomSampler(data, generator=torch.Generator().manual_seed(3)),
    "chosen": lambda data: SubsetRandomSampler(range(0, COUNT, 3), torch.Generator().manual_seed(3)),
    "a rank's": lambda data: DistributedSampler(data, 3, 1, seed=7),
}


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("name", list(SAMPLERS))
def test_the_samplers_order_is_kept_and_planned(node: Daemon, data: Dataset, name: str, workers: int) -> None:
    expected = list(BatchSampler(SAMPLERS[name](data), 32, drop_last=False))
    touched = len({index // EACH for batch in expected for index in batch})
    with Control(node.socket_dir) as control:
        control.evict(data.opened.link.id)
        (before,) = control.status().datasets
        assert numbers(DataLoader(data, 32, sampler=SAMPLERS[name](data), num_workers=workers)) == expected
        # the loader's last report may still be under way
        wait_until(lambda: control.status().datasets[0].epochs[-1].touched == touched)
        (after,) = control.status().datasets
    assert after.source_bytes - before.source_bytes == touched * EACH * RECORD
    if name == "in order":  # a shuffled batch reads from all extents
        assert after.ahead > before.ahead


def test_a_users_own_sampler_is_iterated_batch_by_batch(data: Dataset) -> None:
    asked: list[int] = []

    class Endless(Sampler[int]):
        def __iter__(self) -> Iterator[int]:
            for number in range(1_000_000):
                asked.append(number)
                yield number % COUNT

    batches = iter(DataLoader(data, 32, sampler=Endless()))
    next(batches)
    assert len(asked) <= 64


def test_samplers_behave_as_in_torch(data: Dataset) -> None:
    def both(sampler: Callable[[], Sampler[int]], most: int) -> list[list[list[int]]]:
        """Return the batches of three epochs, each cut after a number of batches, under torch's loader and under this
        one."""
        found = []
        for kind in (TorchLoader, DataLoader):
            batches, seen = kind(data, 4, sampler=sampler()), list[list[int]]()
            for _ in range(3):
                with contextlib.suppress(IndexError):
                    for batch in itertools.islice(batches, most):
                        seen += numbers([batch])  # type: ignore[arg-type]
            found.append(seen)
        return found

    theirs, ours = both(lambda: SubsetRandomSampler([*range(12), COUNT], torch.Generator().manual_seed(5)), 4)
    assert ours == theirs
    assert ours
    theirs, ours = both(lambda: RandomSampler(data, generator=torch.Generator().manual_seed(3)), 2)
    assert ours == theirs
    endless = RandomSampler(data, replacement=True, num_samples=10**10)
    next(iter(DataLoader(data, 4, sampler=endless)))


def test_a_plan_has_first_and_last_steps(data: Dataset) -> None:
    plan = plan_of(data, [[0, EACH], [1, -1], [], [2 * EACH, 2]])
    assert plan.extent.tolist() == [0, 1, EXTENTS - 1, 2]
    assert plan.first_step.tolist() == [0, 0, 1, 3]
    assert plan.last_step.tolist() == [3, 0, 1, 3]
    part = data.select(np.arange(EACH, COUNT))
    assert plan_of(part, [[0], [EACH]]).extent.tolist() == [1, 2]
    assert numbers(DataLoader(Subset(data, [5, 3, 4]), 2, sampler=SequentialSampler(range(3)))) == [
        [5, 3],
        [4],
    ]


def augmented(record: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
    return torch.tensor([int(record.view(torch.int64)[0]), int(rng.integers(0, 1 << 40))])


@pytest.mark.parametrize(
    "workers",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True},
        pytest.param(
            {"num_workers": 1, "persistent_workers": True, "multiprocessing_context": "spawn"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_transforms_are_keyed_by_epoch_as_in_a_sharded_loader(
    node: Daemon, data: Dataset, workers: dict[str, Any]
) -> None:
    options: dict[str, Any] = {"format": "records", "record_bytes": RECORD, "transform": augmented}
    opened = open_dataset(node.root.parent / "records.bin", **options)
    shown = Subset(opened, range(0, COUNT, 5))

    def drawn(loader: DataLoader) -> dict[int, int]:
        return {int(number): int(draw) for batch in loader for number, draw in batch}

    own = DataLoader(shown, 16, shuffle=True, seed=7)
    expected = [drawn(own) for _ in range(3)]
    foreign = DataLoader(shown, 16, sampler=SubsetRandomSampler(range(len(shown))), seed=7, **workers)
    assert [drawn(foreign) for _ in range(3)] == expected
    assert len({tuple(sorted(each.items())) for each in expected}) == 3
    foreign.set_epoch(1)
    assert drawn(foreign) == expected[1]
    opened.close()
