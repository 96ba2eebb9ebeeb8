"""A rank in another epoch than the others gives StateMismatch on all; ranks that leave epochs alike are in step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from cachesvc.core.errors import StateMismatch
from loader.job.rank_drift import IterationEnds, RankPosition
from loader.job.store import JobStore
from tests.support import datasets
from tests.support.training.ranks import Job

COUNT = 64
"""Of 16 steps of two ranks."""


class Ranks:
    """Two ranks of one job, that end the same iteration."""

    def __init__(self, accumulate: int = 1) -> None:
        self.store, self.accumulate = JobStore(dist.HashStore()), accumulate
        self.ends = [IterationEnds(self.store, 1, accumulate) for _ in range(2)]

    def at(self, rank: int, taken: int) -> RankPosition:
        return RankPosition(rank, 0, taken // self.accumulate, taken)

    def leave(self, rank: int, taken: int) -> None:
        self.ends[rank].leave(self.at(rank, taken))

    def complete(self, rank: int, taken: int) -> None:
        self.ends[rank].complete(self.at(rank, taken))

    def go_on(self, rank: int, taken: int) -> None:
        assert self.ends[rank].is_due(taken)
        self.ends[rank].go_on(self.at(rank, taken), taken)


def test_ranks_that_end_an_iteration_alike_are_in_step() -> None:
    for one, other in ((10, 10), (10, 11), (12, 10)):  # a thread that reads ahead had taken one or two more
        ranks = Ranks()
        ranks.leave(0, one)
        ranks.leave(1, other)
    ranks = Ranks()
    ranks.complete(0, 40)
    ranks.complete(1, 40)


@pytest.mark.parametrize("first", [0, 1])
def test_one_of_two_ranks_that_end_an_iteration_differently_sees_it_in_any_order(first: int) -> None:
    endings: list[Callable[[Ranks], None]] = [
        lambda ranks: ranks.leave(0, 1),
        lambda ranks: ranks.complete(1, 40),
    ]
    ranks = Ranks()
    endings[first](ranks)
    says = r"rank 0 left epoch 0 at step 1 and .* rank 1 went on to step 40: .* peek\(\).* set_epoch.* shard=False"
    with pytest.raises(StateMismatch, match=says):
        endings[1 - first](ranks)
    for early, late in ((1, 50), (50, 1)):
        ranks = Ranks()
        ranks.leave(0, early)
        with pytest.raises(StateMismatch, match=r"left epoch 0 at step 1 and .* to step 50"):
            ranks.leave(1, late)


@pytest.mark.parametrize("accumulate", [1, 4])
def test_a_rank_that_goes_on_raises_at_the_step_at_which_the_other_does(accumulate: int) -> None:
    due = [taken for taken in range(100 * accumulate) if Ranks(accumulate).ends[0].is_due(taken)]
    assert due == [4 * accumulate, 8 * accumulate, 16 * accumulate, 32 * accumulate, 64 * accumulate]
    ranks = Ranks(accumulate)
    other = IterationEnds(ranks.store, 2, accumulate)  # the next iteration of the rank that left
    ranks.leave(0, accumulate)
    ranks.go_on(1, due[0])
    other.go_on(ranks.at(0, due[0]), due[0])
    with pytest.raises(StateMismatch, match="rank 1 went on to step 4"):
        ranks.go_on(1, due[1])
    with pytest.raises(StateMismatch, match="rank 1 went on to step 4"):
        other.go_on(ranks.at(0, due[1]), due[1])
    with pytest.raises(StateMismatch, match="rank 1 went on to step 4"):
        other.complete(ranks.at(0, due[1]))


def outcomes(folder: Path, *role: str) -> list[Any]:
    """Run a job of two ranks with a collective in each step, and return what each rank prints."""
    path = folder / "r.npy"
    datasets.array_file(path, np.arange(COUNT, dtype="<i8")[:, None])
    with Job(folder, "looking", [[str(path), *role]] * 2) as job:
        return [json.loads(job.line(rank)) for rank in range(2)]


@pytest.mark.parametrize(
    "role",
    [("0", "before", "0"), pytest.param(("1", "after", "0"), marks=pytest.mark.slow), ("0", "after", "12")],
)
def test_a_rank_that_takes_a_batch_alone_gives_a_mismatch_on_all(
    tmp_path: Path, role: tuple[str, ...]
) -> None:
    for kind, message in outcomes(tmp_path, "next", *role):
        assert kind == "StateMismatch"
        assert f"rank {role[0]} left epoch" in message
        assert "peek()" in message


@pytest.mark.parametrize(
    "role",
    [("peek", "0", "before", "0"), pytest.param(("other", "1", "after", "12"), marks=pytest.mark.slow)],
)
def test_a_look_that_moves_nothing_disturbs_no_rank(tmp_path: Path, role: tuple[str, ...]) -> None:
    epochs = [sorted(one + other) for one, other in zip(*outcomes(tmp_path, *role), strict=True)]
    if role[3] == "0":
        assert epochs == [list(range(COUNT))] * 3
    else:
        assert all(len(set(epoch)) == 48 for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]
