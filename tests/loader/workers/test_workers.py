"""torch's workers under a feed: what a skip leaves out, what their own generators draw, what they raise."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
from itertools import islice
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import numpy as np
import pytest
import torch

from loader import DataLoader
from tests.support import datasets
from tests.support.training.loader_fakes import MemoryLink, compiled, in_memory

COUNT, EACH = 2000, 2
"""Records, and records of a batch."""
WORKERS: list[dict[str, Any]] = [
    {"pin_memory": True},
    {"num_workers": 2},
    {"num_workers": 2, "persistent_workers": True},
    {"num_workers": 2, "worker_type": "thread"},
]


@pytest.fixture(scope="module")
def link(tmp_path_factory: pytest.TempPathFactory) -> MemoryLink:
    """Record n holds n."""
    root = tmp_path_factory.mktemp("records")
    datasets.array_file(root / "r.bin", np.arange(COUNT, dtype="<i8"))
    return compiled(root / "r.bin", root, format="records", dtype="<i8")


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


def alone(link: MemoryLink, **given: Any) -> list[list[int]]:
    return list(DataLoader(in_memory(link), EACH, shuffle=True, collate_fn=plain, **given))


@pytest.mark.parametrize("given", WORKERS)
def test_what_is_skipped_within_an_iteration_is_not_made(link: MemoryLink, given: dict[str, Any]) -> None:
    counted, expected = Counted(), alone(link)
    loader = DataLoader(in_memory(link), EACH, shuffle=True, collate_fn=counted, **given)
    for _ in range(2):  # the second iteration of workers that persist, too
        batches = iter(loader)
        found = [next(batches)]
        loader.skip(900)
        found += islice(batches, 3)
        loader.skip(1)  # which workers have made already
        found += batches
        assert found == [expected[0], *expected[901:904], *expected[905:]]
        loader.set_epoch(0)
    assert counted.made.value <= 2 * (len(found) + 10)


@pytest.mark.parametrize("given", WORKERS)
def test_a_skip_within_an_iteration_may_reach_into_the_next_epoch(
    link: MemoryLink, given: dict[str, Any]
) -> None:
    counted, expected = Counted(), alone(link, epochs=2)
    loader = DataLoader(in_memory(link), EACH, shuffle=True, epochs=2, collate_fn=counted, **given)
    batches = iter(loader)
    assert next(batches) == expected[0]
    loader.skip(COUNT // EACH + 500)
    assert list(batches) == expected[COUNT // EACH + 501 :]
    assert counted.made.value <= 520


def test_a_worker_that_dies_before_a_skip_is_an_error_and_a_state_stands_behind_the_skip(
    link: MemoryLink,
) -> None:
    loader = DataLoader(in_memory(link), EACH, shuffle=True, num_workers=2, collate_fn=plain)
    batches = iter(loader)
    next(batches)
    for worker in multiprocessing.active_children():
        os.kill(worker.pid or 0, signal.SIGKILL)
    loader.skip(900)
    with pytest.raises(RuntimeError, match=r"DataLoader worker.*killed"):
        list(batches)
    resumed = DataLoader(in_memory(link), EACH, shuffle=True, num_workers=1, collate_fn=plain)
    resumed.load_state_dict(loader.state_dict())
    assert list(resumed) == alone(link)[901:]


def drawn(sample: torch.Tensor) -> list[float]:
    """As transforms without an `rng` draw: from torch's, numpy's and Python's own generators."""
    return [int(torch.randint(1 << 60, (1,))), np.random.random(), random.random()]


def of_workers(link: MemoryLink, state: dict[str, Any] | None = None, **given: Any) -> DataLoader:
    data = in_memory(link, transform=drawn)
    loader = DataLoader(data, 500, shuffle=True, num_workers=1, collate_fn=list, **given)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def noise(batches: Any) -> list[tuple[float, ...]]:
    return [tuple(sample) for batch in batches for sample in batch]


@pytest.mark.parametrize("generator", [0, 1, 2])
def test_workers_own_generators_go_on_with_other_noise_where_a_run_is_resumed(
    link: MemoryLink, generator: int
) -> None:
    def of_it(batches: Any) -> list[float]:
        return [each[generator] for each in noise(batches)]

    loader = of_workers(link)
    first = of_it(loader)
    between = loader.state_dict()
    loader.load_state_dict(between)  # as at every checkpoint that is read at once
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


def test_a_generator_of_the_users_seeds_workers_as_in_torch(link: MemoryLink) -> None:
    def epochs(kind: Any, **more: Any) -> list[list[tuple[float, ...]]]:
        given = {"num_workers": 1, "collate_fn": list, "generator": torch.Generator().manual_seed(5)}
        loader = kind(in_memory(link, transform=drawn), 500, **given, **more)
        return [noise(loader) for _ in range(2)]

    assert epochs(DataLoader) == epochs(torch.utils.data.DataLoader)


class Veiled(Exception):
    """Shows nothing of what it was made with."""

    def __str__(self) -> str:
        return "nothing to see"


class Worded(Exception):
    """Makes its own words of what it is given."""

    def __init__(self, path: object) -> None:
        super().__init__(f"cannot decode {path}")


def fails_twice(sample: torch.Tensor) -> int:
    if int(sample) in (5, 9):
        raise (Veiled if int(sample) == 5 else Worded)(5)
    return int(sample)


def test_exceptions_of_their_own_words_leave_the_next_batch(link: MemoryLink) -> None:
    data = in_memory(link, transform=fails_twice).take(16)
    batches, found = iter(DataLoader(data, 4, num_workers=1, collate_fn=list)), list[Any]()
    for _ in range(4):
        try:
            found.append(next(batches))
        except (Veiled, Worded):
            found.append("raised")
    assert found == [[0, 1, 2, 3], "raised", "raised", [12, 13, 14, 15]]
