"""A process forked in mid-epoch: the parent keeps its workers, and the child gets its own."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from cachesvc.core.errors import InvalidInput
from loader import DataLoader
from tests.support.training.loader_fakes import MemoryLink, in_memory

COUNT = 60
CHILD_S = 20
WORKERS: list[dict[str, Any]] = [
    {"num_workers": 1},
    {"num_workers": 1, "persistent_workers": True},
    {"num_workers": 1, "worker_type": "thread"},
    {"num_workers": 1, "worker_type": "thread", "persistent_workers": True},
]


def numbers(batches: Iterator[Any] | DataLoader) -> list[int]:
    return [int(n) for batch in batches for n in batch[:, 0]]


def in_child(work: Callable[[], bool]) -> int:
    """Return the exit code of a forked child: 0 if `work` succeeds, negative for a signal."""
    child = os.fork()
    if not child:
        signal.alarm(CHILD_S)
        code = 3
        try:
            code = 0 if work() else 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("workers", WORKERS)
def test_parent_and_child_each_iterate_the_same_loader(link: MemoryLink, workers: dict[str, Any]) -> None:
    loader = DataLoader(in_memory(link), batch_size=5, timeout=CHILD_S, **workers)
    batches = iter(loader)
    found = numbers(iter([next(batches)]))
    whole = list(range(COUNT))
    assert in_child(lambda: numbers(loader) == whole and in_child(lambda: numbers(loader) == whole) == 0) == 0
    assert found + numbers(batches) == whole
    assert numbers(loader) == whole


def collect(record: torch.Tensor) -> torch.Tensor:
    """Collects garbage in a thread, whose memory comes from a thread that stayed with the trainer."""
    thread = threading.Thread(target=gc.collect)
    thread.start()
    thread.join()
    return record


def stores_in_garbage() -> None:
    """Leave what a failed `init_process_group` leaves: a store in the frames of an exception. A store joins its
    threads when it dies."""
    caught: list[Exception] = []
    try:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=CHILD_S))
        raise RuntimeError(store.port)
    except RuntimeError as error:
        caught.append(error)


@pytest.mark.parametrize("ours", [True, False])
def test_a_worker_collects_no_garbage_of_its_trainer(link: MemoryLink, ours: bool) -> None:
    gc.collect()
    gc.disable()
    try:
        stores_in_garbage()
        data = in_memory(link, transform=collect) if ours else Collecting()
        assert numbers(DataLoader(data, batch_size=5, num_workers=1, timeout=CHILD_S)) == list(range(COUNT))
    finally:
        gc.enable()
        gc.collect()


class Collecting(Dataset[torch.Tensor]):
    """A user's own dataset."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> torch.Tensor:
        return collect(torch.tensor([index]))


def test_a_child_process_collects_the_garbage_it_inherited(link: MemoryLink) -> None:
    gc.collect()
    assert numbers(DataLoader(in_memory(link), batch_size=5, num_workers=1)) == list(range(COUNT))
    frozen = gc.get_freeze_count()  # modules and test items; in Python 3.12 immortal objects, too
    assert in_child(lambda: gc.get_freeze_count() <= frozen) == 0


@pytest.mark.parametrize("workers", WORKERS)
def test_a_child_that_drops_the_loader_leaves_the_parents_workers_running(
    link: MemoryLink, workers: dict[str, Any]
) -> None:
    held: dict[str, Any] = {"loader": DataLoader(in_memory(link), batch_size=5, timeout=CHILD_S, **workers)}
    held["batches"] = iter(held["loader"])
    next(held["batches"])

    def drop() -> bool:
        held.clear()
        return gc.collect() >= 0

    assert in_child(drop) == 0
    assert len(numbers(held["batches"])) == COUNT - 5


@pytest.mark.parametrize("workers", WORKERS)
def test_a_child_cannot_continue_its_parents_iteration(link: MemoryLink, workers: dict[str, Any]) -> None:
    loader = DataLoader(in_memory(link), batch_size=5, timeout=CHILD_S, **workers)
    batches = iter(loader)
    next(batches)

    def continue_iteration() -> bool:
        with pytest.raises(InvalidInput, match="forked"):
            next(batches)
        return len(numbers(loader)) > 0

    assert in_child(continue_iteration) == 0
    assert len(numbers(batches)) == COUNT - 5
