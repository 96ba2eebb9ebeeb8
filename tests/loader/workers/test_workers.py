"""torch's workers under a feed: skipped batches, the workers' own generators, and exceptions."""

from __future__ import annotations

import multiprocessing
import random
from itertools import islice
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
import pytest
import torch

from loader import DataLoader
from tests.support.training.loader_fakes import MemoryLink, in_memory

COUNT, EACH = 2000, 2
"""Records, and records per batch."""
WORKERS: list[dict[str, Any]] = [
    {"pin_memory": True},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "worker_type": "thread"},
]


class Counted:
    """A collate_fn that counts the batches of all processes."""

    def __init__(self) -> None:
        self.made: Synchronized[int] = multiprocessing.Value("i", 0)

    def __call__(self, samples: list[torch.Tensor]) -> list[int]:
        with self.made.get_lock():
            self.made.value += 1
        return [int(sample) for sample in samples]


def plain(samples: list[torch.Tensor]) -> list[int]:
    return [int(sample) for sample in samples]


def in_process(link: MemoryLink, **given: Any) -> list[list[int]]:
    return list(DataLoader(in_memory(link), EACH, shuffle=True, collate_fn=plain, **given))


@pytest.mark.parametrize("given", WORKERS)
def test_skipped_batches_are_not_made(link: MemoryLink, given: dict[str, Any]) -> None:
    counted, expected = Counted(), in_process(link)
    loader = DataLoader(in_memory(link), EACH, shuffle=True, collate_fn=counted, **given)
    for _ in range(2):  # also in the second iteration of persistent workers
        batches = iter(loader)
        found = [next(batches)]
        loader.skip(900)
        found += islice(batches, 3)
        loader.skip(1)  # workers have made that batch already
        found += batches
        assert found == [expected[0], *expected[901:904], *expected[905:]]
        loader.set_epoch(0)
    assert counted.made.value <= 2 * (len(found) + 10)


@pytest.mark.parametrize("given", WORKERS)
def test_a_skip_may_reach_into_the_next_epoch(link: MemoryLink, given: dict[str, Any]) -> None:
    counted, expected = Counted(), in_process(link, epochs=2)
    loader = DataLoader(in_memory(link), EACH, shuffle=True, epochs=2, collate_fn=counted, **given)
    batches = iter(loader)
    assert next(batches) == expected[0]
    loader.skip(COUNT // EACH + 500)
    assert list(batches) == expected[COUNT // EACH + 501 :]
    assert counted.made.value <= 520


def draw_from_global_generators(sample: torch.Tensor) -> list[float]:
    """A transform without `rng`: it draws from the generators of torch, numpy and Python."""
    return [int(torch.randint(1 << 60, (1,))), np.random.random(), random.random()]


def of_workers(link: MemoryLink, state: dict[str, Any] | None = None, **given: Any) -> DataLoader:
    data = in_memory(link, transform=draw_from_global_generators)
    loader = DataLoader(data, 500, shuffle=True, num_workers=1, collate_fn=list, **given)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def noise(batches: Any) -> list[tuple[float, ...]]:
    return [tuple(sample) for batch in batches for sample in batch]


@pytest.mark.parametrize("generator", [0, 1, 2])
def test_workers_generators_draw_other_noise_after_a_resume(link: MemoryLink, generator: int) -> None:
    def of_it(batches: Any) -> list[float]:
        return [each[generator] for each in noise(batches)]

    loader = of_workers(link)
    first = of_it(loader)
    between = loader.state_dict()
    loader.load_state_dict(between)  # a checkpoint that is loaded at once
    second = of_it(loader)
    batches = iter(loader)
    third = of_it(islice(batches, 2))
    within = loader.state_dict()
    rest = of_it(of_workers(link, within))
    draws = first + second + third + rest
    assert len(set(draws)) == len(draws) == 3 * COUNT
    assert of_it(of_workers(link, between)) == second
    assert of_it(of_workers(link, within)) == rest
    assert of_it(of_workers(link)) == first


def test_a_users_generator_seeds_workers_as_in_torch(link: MemoryLink) -> None:
    def epochs(kind: Any, **more: Any) -> list[list[tuple[float, ...]]]:
        given = {"num_workers": 1, "collate_fn": list, "generator": torch.Generator().manual_seed(5)}
        loader = kind(in_memory(link, transform=draw_from_global_generators), 500, **given, **more)
        return [noise(loader) for _ in range(2)]

    assert epochs(DataLoader) == epochs(torch.utils.data.DataLoader)


class HidesArguments(Exception):
    """An exception whose text hides its arguments."""

    def __str__(self) -> str:
        return "nothing to see"


class RewordsArguments(Exception):
    """An exception that makes its own text of its arguments."""

    def __init__(self, path: object) -> None:
        super().__init__(f"cannot decode {path}")


def fails_twice(sample: torch.Tensor) -> int:
    if int(sample) in (5, 9):
        raise (HidesArguments if int(sample) == 5 else RewordsArguments)(5)
    return int(sample)


def test_the_next_batch_comes_after_exceptions_with_custom_texts(link: MemoryLink) -> None:
    data = in_memory(link, transform=fails_twice).take(16)
    batches, found = iter(DataLoader(data, 4, num_workers=1, collate_fn=list)), list[Any]()
    for _ in range(4):
        try:
            found.append(next(batches))
        except (HidesArguments, RewordsArguments):
            found.append("raised")
    assert found == [[0, 1, 2, 3], "raised", "raised", [12, 13, 14, 15]]
