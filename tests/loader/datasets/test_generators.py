"""The `rng` of transforms under loaders that are not ours: it differs from epoch to epoch, as torch's numbers do."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset, DistributedSampler
from torch.utils.data import DataLoader as TorchLoader

from loader import DataLoader, Dataset
from tests.support.training.loader_fakes import MemoryLink, drawing, in_memory

COUNT, EPOCHS = 24, 3


def draws(batches: Any, each_epoch: Any = lambda epoch: None) -> list[dict[int, int]]:
    """The number that each sample drew, by epoch."""
    found = []
    for epoch in range(EPOCHS):
        each_epoch(epoch)
        found.append({int(sample): int(drawn) for batch in batches for sample, drawn in batch})
    return found


def assert_all_differ(epochs: list[dict[int, int]]) -> None:
    drawn = [number for epoch in epochs for number in epoch.values()]
    assert len(drawn) == EPOCHS * COUNT
    assert len(set(drawn)) == len(drawn)


WORKERS: list[dict[str, Any]] = [{}, {"num_workers": 1}, {"num_workers": 2, "persistent_workers": True}]


@pytest.mark.parametrize("given", WORKERS)
def test_under_torchs_loader_each_epoch_draws_other_numbers(link: MemoryLink, given: dict[str, Any]) -> None:
    data = in_memory(link, transform=drawing)
    sampler: DistributedSampler[Any] = DistributedSampler(data, num_replicas=1, rank=0)
    assert_all_differ(draws(TorchLoader(data, 8, sampler=sampler, **given), sampler.set_epoch))
    parts: ConcatDataset[Any] = ConcatDataset([data.take(9), data.select(range(9, COUNT))])
    assert_all_differ(draws(TorchLoader(parts, 8, **given)))


def test_the_numbers_follow_torchs_generator_and_leave_it_alone_where_none_are_drawn(
    link: MemoryLink,
) -> None:
    data = in_memory(link, transform=drawing)

    def seeded() -> list[list[int]]:
        torch.manual_seed(3)
        return [data[index].tolist() for index in (4, 4, 5)]

    first = seeded()
    assert first == seeded()
    assert len({number for _, number in first}) == 3
    before = torch.random.get_rng_state()
    in_memory(link)[4]
    next(iter(DataLoader(data, 8, shuffle=True, num_workers=1)))
    assert torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("given", WORKERS)
def test_set_epoch_of_a_dataset_keys_its_numbers_in_workers_too(
    link: MemoryLink, given: dict[str, Any]
) -> None:
    """Accelerate calls it, on one rank: before each epoch, while persistent workers are running."""
    data = in_memory(link, transform=drawing)
    exact = draws(DataLoader(in_memory(link, transform=drawing), 8))
    assert draws(TorchLoader(data, 8, **given), data.set_epoch) == exact


@pytest.mark.parametrize(
    "copied", [lambda data: data.take(COUNT), copy.copy, lambda data: pickle.loads(pickle.dumps(data))]
)
def test_copies_and_parts_have_the_key_of_their_dataset(link: MemoryLink, copied: Any) -> None:
    data: Dataset = in_memory(link, transform=drawing)
    assert not torch.equal(copied(data)[0], copied(data)[0])
    data.set_epoch(2)
    assert torch.equal(copied(data)[0], data[0])
