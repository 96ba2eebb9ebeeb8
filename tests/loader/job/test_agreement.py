"""Ranks that were moved out of step all raise before the next batch, whatever moved them."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable
from multiprocessing.queues import Queue
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import Subset

from loader import DataLoader
from testbed import WAIT_S
from testbed.servers import free_ports
from tests.support.training.loader_fakes import MemoryLink, in_memory

COUNT, SOON_S = 96, WAIT_S
Answered = tuple[int, str, float]
Moves = Callable[[int, "DataLoader"], object]


def _rank(rank: int, port: int, link: MemoryLink, moved: Moves, answers: Queue[Answered]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    data = in_memory(link)
    loader = DataLoader(Subset(data, range(COUNT)), 4, shuffle=True)
    began = time.monotonic()
    try:
        list(loader)
        began = time.monotonic()
        moved(rank, loader)
        steps = len(list(loader))
        answers.put((rank, f"{steps} steps", time.monotonic() - began))
    except Exception as error:  # noqa: BLE001 - reported to the test
        answers.put((rank, f"{type(error).__name__}: {error}", time.monotonic() - began))
    dist.barrier()
    dist.destroy_process_group()


def both(work: Callable[..., None], *given: object) -> list[Any]:
    """The answers of two ranks, one of each."""
    (port,) = free_ports(1)
    context = multiprocessing.get_context("fork")
    answers: Queue[Any] = context.Queue()
    ranks = [context.Process(target=work, args=(rank, port, *given, answers)) for rank in range(2)]
    for each in ranks:
        each.start()
    try:
        return sorted(answers.get(timeout=WAIT_S) for _ in ranks)
    finally:
        for each in ranks:
            each.join(WAIT_S)
            each.kill()


def job(link: MemoryLink, moved: Moves) -> list[Answered]:
    """The answers of two ranks after their second epoch, before which each is `moved`."""
    return both(_rank, link, moved)


def _other_subsets(rank: int, loader: DataLoader) -> None:
    loader.dataset.indices = range(64 + 16 * rank)  # type: ignore[attr-defined]


def _other_skips(rank: int, loader: DataLoader) -> None:
    loader.skip(1 + rank)


def _other_epochs(rank: int, loader: DataLoader) -> None:
    loader.set_epoch(3 + rank)


def _other_than_one_s_next(rank: int, loader: DataLoader) -> None:
    loader.set_epoch(1 + rank)


def _other_states(rank: int, loader: DataLoader) -> None:
    state = loader.state_dict()
    loader.load_state_dict(state | {"epoch": 1, "step": rank})


def _other_orders(rank: int, loader: DataLoader) -> None:
    loader.load_state_dict(loader.state_dict() | {"rotated_from": rank})


@pytest.mark.parametrize(
    "moved",
    [_other_subsets, _other_skips, _other_epochs, _other_than_one_s_next, _other_states, _other_orders],
)
def test_ranks_moved_to_different_places_raise(link: MemoryLink, moved: Moves) -> None:
    for _, text, after_s in job(link, moved):
        assert text.startswith("StateMismatch: the job's processes disagree: ")
        assert after_s < SOON_S


def _same_subset(rank: int, loader: DataLoader) -> None:
    loader.dataset.indices = range(64)  # type: ignore[attr-defined]


def _same_skip(rank: int, loader: DataLoader) -> None:
    loader.set_epoch(1)
    loader.skip(2)


def _printed_one(rank: int, loader: DataLoader) -> None:
    """One rank alone takes a batch, to print it; then the usual loop continues."""
    if rank == 0:
        next(iter(loader))
    loader.set_epoch(1)


@pytest.mark.parametrize(("moved", "steps"), [(_same_subset, 8), (_same_skip, 10), (_printed_one, 12)])
def test_ranks_moved_to_the_same_place_continue(link: MemoryLink, moved: Moves, steps: int) -> None:
    assert [text for _, text, _ in job(link, moved)] == [f"{steps} steps"] * 2


def _one_cannot(rank: int, loader: DataLoader) -> None:
    state = loader.state_dict()
    loader.load_state_dict(state | {"samples": COUNT + rank})


def test_a_rank_that_cannot_begin_tells_the_others_at_once(link: MemoryLink) -> None:
    (_, first, first_s), (_, second, second_s) = job(link, _one_cannot)
    assert first.startswith("StateMismatch: process 1 cannot go on: StateMismatch: ")
    assert second.startswith("StateMismatch: ")
    assert str(COUNT + 1) in second
    assert max(first_s, second_s) < SOON_S


def _alone(rank: int, port: int, link: MemoryLink, answers: Queue[tuple[int, list[list[int]]]]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    data = in_memory(link)
    train, evaluate = DataLoader(data, 4, shuffle=True), DataLoader(data, 5, shard=False)
    seen: list[list[int]] = []
    for _ in range(2):
        samples: list[int] = []
        for batch in train:
            samples += batch.flatten().tolist()
            dist.all_reduce(batch)
        seen.append(samples)
        if rank == 0:
            assert len(evaluate) == -(-COUNT // 5)
            evaluate.load_state_dict(evaluate.state_dict())  # no other rank shares its position
            seen.append([n for batch in evaluate for n in batch.flatten().tolist()])
    answers.put((rank, seen))
    dist.barrier()
    dist.destroy_process_group()


def test_a_loader_of_one_rank_alone_reads_all_without_waiting(link: MemoryLink) -> None:
    (_, first), (_, second) = both(_alone, link)
    assert first[1] == first[3] == list(range(COUNT))
    for mine, theirs in ((first[0], second[0]), (first[2], second[1])):
        assert sorted(mine + theirs) == list(range(COUNT))


def _summing(rank: int, port: int, link: MemoryLink, answers: Queue[Answered]) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE="2")
    dist.init_process_group("gloo")
    loader = DataLoader(in_memory(link), 4, shuffle=True, skip_steps=[(1, 2)])
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    early = loader.digest()
    state = loader.state_dict()
    assert state["digest"] == early.hex()
    list(batches)
    whole = loader.digest()
    loader.load_state_dict(state)
    list(loader)
    assert loader.digest() == whole, "a resumed run ends with the same digest"
    next(iter(loader)) if rank else None
    try:
        loader.digest()
    except Exception as error:  # noqa: BLE001 - reported to the test
        answers.put((rank, f"{whole.hex()} {type(error).__name__}: {error}", 0.0))
    dist.barrier()
    dist.destroy_process_group()


def test_all_ranks_have_the_digest_of_one_rank_and_differ_only_at_unlike_places(link: MemoryLink) -> None:
    alone = DataLoader(in_memory(link), 8, shuffle=True, skip_steps=[(1, 2)])
    list(alone)
    expected = alone.digest().hex()
    for _, text, _ in both(_summing, link):
        assert text.startswith(f"{expected} StateMismatch: the job's processes disagree: ")
