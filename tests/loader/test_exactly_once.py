"""Every sample once an epoch, the same global order at any scale, and resumed anywhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from cachesvc.core.errors import InvalidInput
from loader import DataLoader
from loader.datasets.dataset import Dataset
from tests.support.training.loader_fakes import (
    MemoryLink,
    in_memory,
    in_step,
    numbers_in,
    wide_records,
)

COUNT = 203


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    return wide_records(tmp_path_factory.mktemp("records"), COUNT)


def seen(loader: DataLoader) -> list[list[int]]:
    """The real samples of each batch of one iteration."""
    return [numbers_in(batch)[: loader.valid] for batch in loader]


def ranks(link: MemoryLink, world: int, **settings: object) -> list[DataLoader]:
    return [
        DataLoader(in_memory(link), shuffle=True, rank=rank, world_size=world, window=16384, **settings)  # type: ignore[arg-type]
        for rank in range(world)
    ]


@pytest.mark.parametrize("context", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_workers_see_what_the_trainer_alone_would(link: MemoryLink, context: str) -> None:
    [alone] = ranks(link, 1, batch_size=16)
    workers = 2 if context == "fork" else 1  # each that is spawned imports torch
    [shared] = ranks(link, 1, batch_size=16, num_workers=workers, multiprocessing_context=context)
    assert seen(shared) == seen(alone)
    assert sum(shared.stats().bytes_by_origin.values()) == COUNT * 2048


@pytest.mark.parametrize("last", ["pad", "short"])
def test_the_global_batches_are_the_same_at_any_scale_and_resume_in_mid_epoch(
    link: MemoryLink, last: str
) -> None:
    def globally(
        world: int, size: int, state: object = None, stop: int = 99, **more: object
    ) -> list[set[int]]:
        loaders = ranks(link, world, batch_size=size, last=last, **more)
        steps, after = in_step(loaders, state, stop)
        states.append(after)
        return [{n for batch, valid in step for n in numbers_in(batch)[:valid]} for step in steps]

    states: list[dict[str, object]] = []
    whole = globally(1, 24)
    assert globally(2, 12) == whole
    assert globally(3, 8) == whole
    head = globally(3, 8, stop=2)
    middle = globally(1, 24, states[-1], stop=3, num_workers=2, multiprocessing_context="fork")
    end = globally(2, 12, states[-1])
    assert head + middle + end == whole
    assert states[-1]["epoch"] == 1


@pytest.mark.parametrize(
    ("samples", "world", "size", "accumulate"),
    [
        (101, 2, 32, 1),
        (65, 2, 32, 1),
        (COUNT, 3, 4, 2),
        (2, 3, 4, 2),
        (40, 2, 3, 5),
        (41, 1, 4, 4),
        (7, 1, 8, 1),
    ],
)
@pytest.mark.parametrize("workers", [0, 2])
def test_without_drop_last_an_epoch_is_padded_to_a_multiple_of_ranks_and_micro_batches(
    link: MemoryLink, samples: int, world: int, size: int, accumulate: int, workers: int
) -> None:
    """The padding is that of DistributedSampler, and torch's short batch on one rank; a metric over `valid` is exact."""
    data = in_memory(link).take(samples)
    shapes, handed, total = [], 0, 0
    for rank in range(world):
        loader = DataLoader(
            data,
            size,
            shuffle=True,
            rank=rank,
            world_size=world,
            global_batch_size=size * world * accumulate,
            num_workers=workers,
            worker_type="thread",
        )
        found = [(numbers_in(batch), loader.valid, loader.indices.tolist()) for batch in loader]
        assert all(numbers == indices for numbers, _, indices in found)
        shapes.append([len(numbers) for numbers, _, _ in found])
        handed += sum(shapes[-1])
        total += sum(sum(numbers[:valid]) for numbers, valid, _ in found)
    parts = world * accumulate
    assert handed == -(-samples // parts) * parts
    assert all(each == shapes[0] for each in shapes)
    assert min(shapes[0]) > 0
    assert len(shapes[0]) == -(-samples // (size * parts)) * accumulate
    assert total == sum(range(samples))


def test_gathered_results_are_cut_to_the_length_of_the_dataset(link: MemoryLink) -> None:
    loaders = [DataLoader(in_memory(link), 9, rank=rank, world_size=4) for rank in range(4)]
    steps = zip(*loaders, strict=True)
    gathered = [number for batches in steps for batch in batches for number in numbers_in(batch)]
    assert gathered[:COUNT] == list(range(COUNT))


def test_a_global_batch_that_does_not_divide_is_refused(link: MemoryLink) -> None:
    with pytest.raises(InvalidInput, match="10"):
        len(ranks(link, 3, batch_size=4, global_batch_size=10)[0])
    state = ranks(link, 2, batch_size=7)[0].state_dict()
    with pytest.raises(InvalidInput, match="14"):
        ranks(link, 3, batch_size=7)[0].load_state_dict(state)


def test_split_parts_are_disjoint_and_repeatable(link: MemoryLink, tmp_path: Path) -> None:
    parts = in_memory(link).split({"train": 0.9, "val": 0.1}, seed=3)
    again = in_memory(link).split({"train": 0.9, "val": 0.1}, seed=3)
    ids = {name: set(seen_ids(part)) for name, part in parts.items()}
    assert ids["train"] | ids["val"] == set(range(COUNT))
    assert not ids["train"] & ids["val"]
    assert {name: set(seen_ids(part)) for name, part in again.items()} == ids


def seen_ids(dataset: Dataset) -> list[int]:
    assert dataset.ids is not None
    return dataset.ids.tolist()
