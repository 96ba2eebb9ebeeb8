"""Iterations of one loader: a newer one takes over, exceptions end none, threads share one."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout  # before Python 3.11 not the builtin
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from cachesvc.core.errors import (
    CacheError,
    SourceUnavailable,
)
from loader import DataLoader
from testbed import WAIT_S
from tests.support.training.loader_fakes import MemoryLink, in_memory

COUNT = 100


def test_an_iteration_has_the_length_of_its_loader_when_it_began(link: MemoryLink) -> None:
    for loader_type in (torch.utils.data.DataLoader, DataLoader):
        batches: Any = iter(loader_type(in_memory(link), 7, drop_last=True))
        assert (len(batches), len(list(islice(batches, 3))), len(batches)) == (14, 3, 14)
    loader = DataLoader(in_memory(link), 7, epochs=2)
    loader.skip(5)
    batches = iter(loader)
    assert len(batches) == len(loader) == 25
    assert len(list(batches)) == 25
    assert len(iter(DataLoader(in_memory(link), 7, epochs=None))) == 15  # type: ignore[arg-type]
    empty = iter(DataLoader(in_memory(link), 1000, drop_last=True))
    assert len(empty) == 0  # type: ignore[arg-type]
    assert list(empty) == []


class Spoilt:
    """A transform that fails for some records."""

    def __call__(self, record: torch.Tensor) -> int:
        number = int(record[0])
        if number in (3, 4, 61):
            raise ValueError(f"record {number} is spoilt")
        return number


MADE_BY: list[dict[str, Any]] = [
    {},
    {"pin_memory": True},
    {"num_workers": 2},
    {"num_workers": 2, "worker_type": "thread"},
]


@pytest.mark.parametrize("given", MADE_BY)
def test_iterating_on_after_an_exception_gives_the_next_batch_as_in_torch(
    link: MemoryLink, given: dict[str, Any]
) -> None:
    def gone_on(loader: Any) -> list[list[int]]:
        found, batches = [], iter(loader)
        while True:
            try:
                found.append(next(batches).tolist())
            except StopIteration:
                return found
            except ValueError:
                found.append([])

    data = in_memory(link, transform=Spoilt())
    loader = DataLoader(data, 10, **given)
    expected = gone_on(torch.utils.data.DataLoader(data, 10))
    assert gone_on(loader) == expected
    assert loader.epoch == 1
    assert sum(not batch for batch in expected) == 2
    batches = iter(loader)
    with pytest.raises(ValueError, match="record 3 is spoilt"):
        next(batches)
    resumed = DataLoader(data, 10, **given)
    resumed.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="record 3 is spoilt"):
        next(iter(resumed))


@pytest.mark.parametrize("given", MADE_BY)
def test_a_skip_over_failing_batches_loses_no_other(link: MemoryLink, given: dict[str, Any]) -> None:
    """The failing batches are those of records 3 and 4, which workers have prefetched."""
    loader = DataLoader(
        in_memory(link, transform=Spoilt()), 2, prefetch_factor=4 if "num_workers" in given else None, **given
    )
    batches = iter(loader)
    assert next(batches).tolist() == [0, 1]
    loader.skip(2)
    assert next(batches).tolist() == [6, 7]
    assert next(batches).tolist() == [8, 9]


@pytest.mark.parametrize("given", MADE_BY)
def test_a_batch_is_retried_after_its_source_was_unavailable(
    link: MemoryLink, tmp_path: Path, given: dict[str, Any]
) -> None:
    def away(record: torch.Tensor) -> int:
        if int(record[0]) == 33 and not (tmp_path / "back").exists():
            (tmp_path / "back").touch()
            raise SourceUnavailable("away for a moment")
        return int(record[0])

    batches = iter(DataLoader(in_memory(link, transform=away), 10, **given))
    found = [next(batches) for _ in range(3)]
    with pytest.raises(SourceUnavailable, match="away"):
        next(batches)
    found += list(batches)
    assert torch.cat(found).tolist() == list(range(len(in_memory(link))))


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.slow
def test_batches_of_hanging_workers_are_not_lost(link: MemoryLink, persistent: bool) -> None:
    def slow(record: torch.Tensor) -> int:
        number = int(record[0])
        time.sleep(8 if number == 25 else 0)
        return number

    loader = DataLoader(
        in_memory(link, transform=slow), 10, num_workers=1, timeout=4, persistent_workers=persistent
    )
    batches = iter(loader)
    assert [next(batches)[0].item() for _ in range(2)] == [0, 10]
    with pytest.raises(RuntimeError, match="timed out"):
        next(batches)
    with pytest.raises(CacheError, match="has ended with an error"):
        next(batches)
    assert loader.state_dict()["step"] == 2


def test_dropping_an_iteration_after_an_exception_ends_it_at_once(link: MemoryLink) -> None:
    def trained() -> weakref.ref[Any]:
        batches = iter(DataLoader(in_memory(link, transform=Spoilt()), 10))
        try:
            for _ in batches:
                pass
        except ValueError:
            return weakref.ref(batches)
        raise AssertionError

    gc.collect()
    gc.disable()
    try:
        assert trained()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("more", [{}, {"num_workers": 2}, {"num_workers": 1, "worker_type": "thread"}])
def test_threads_that_share_an_iteration_get_each_batch_once(link: MemoryLink, more: dict[str, Any]) -> None:
    batches = iter(DataLoader(in_memory(link), batch_size=5, shuffle=True, **more))
    seen: list[list[int]] = []

    def take() -> None:
        seen.extend(batch[:, 0].tolist() for batch in batches)

    with ThreadPoolExecutor(4) as pool:
        for taken in [pool.submit(take) for _ in range(4)]:
            taken.result(WAIT_S)
    assert sorted(value for batch in seen for value in batch) == list(range(COUNT))


def test_a_second_thread_waits_for_a_batch_and_a_reentrant_call_raises(
    link: MemoryLink,
) -> None:
    inside, go_on = threading.Event(), threading.Event()

    def slow(samples: list[Any]) -> int:
        inside.set()
        assert go_on.wait(WAIT_S)
        return len(samples)

    batches = iter(DataLoader(in_memory(link), batch_size=50, collate_fn=slow))
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(next, batches)
        assert inside.wait(WAIT_S)
        second = pool.submit(next, batches)
        with pytest.raises(FutureTimeout):
            second.result(0.2)
        go_on.set()
        assert (first.result(WAIT_S), second.result(WAIT_S)) == (50, 50)
    batches = iter(DataLoader(in_memory(link), batch_size=50, collate_fn=lambda _: next(batches)))
    with pytest.raises(ValueError, match="already executing"):
        next(batches)
