"""Ranks that take different numbers of batches are warned of once, by name; slow ranks are not."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from loader.job.rank_drift import DriftWatch, RankPosition
from loader.job.store import JobStore
from testbed import WAIT_S
from tests.support import datasets
from tests.support.training.ranks import Job


class Ranks:
    """A job of ranks in this process that update every half second of a fake clock."""

    def __init__(self, prefetches: list[int], accumulate: int = 1) -> None:
        store, self.now, self.accumulate = JobStore(dist.HashStore()), 100.0, accumulate
        self.watches = [DriftWatch(store, rank, each, accumulate) for rank, each in enumerate(prefetches)]

    def spend(self, seconds: float, at: Callable[[int, float], int | None]) -> None:
        """Let time pass in which a rank has taken `at(rank, moment)` batches; None: its position is not known."""
        end = self.now + seconds
        while self.now < end:
            for rank, watch in enumerate(self.watches):
                found = at(rank, self.now - 100.0)
                place = None if found is None else RankPosition(rank, 0, found // self.accumulate, found)
                watch.update(place, self.now + rank * 0.1)
            self.now += 0.5


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.WARNING, "cachesvc")
    return lambda: [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("rate", [0, 1, 3])
@pytest.mark.parametrize("adrift", [0, 1, 2])
@pytest.mark.parametrize("lead", [+20, -20])
def test_one_warning_names_the_rank_that_stays_ahead_or_behind(
    warnings: Callable[[], list[str]], rate: int, adrift: int, lead: int
) -> None:
    ranks = Ranks([4, 4, 4])
    ranks.spend(20.0, lambda rank, at: 50 + int(rate * at) + lead * (rank == adrift))
    assert warnings() == []
    ranks.spend(60.0, lambda rank, at: 50 + int(rate * at) + lead * (rank == adrift))
    [warning] = warnings()
    assert f"rank {adrift} is at epoch 0, step " in warning
    assert "for 3" in warning


def test_ranks_within_a_prefetch_or_late_or_fast_are_no_drift(warnings: Callable[[], list[str]]) -> None:
    ranks = Ranks([8, 8, 8])
    ranks.spend(90.0, lambda rank, at: 1000 * int(at) + 8 * (rank == 1))
    ranks.spend(90.0, lambda rank, at: 200_000 + int(at) - 8 * (rank == 2))
    assert warnings() == []


def test_micro_batches_of_a_step_are_no_drift(warnings: Callable[[], list[str]]) -> None:
    ranks = Ranks([0, 0], accumulate=16)
    ranks.spend(90.0, lambda rank, at: int(at) + 32 * rank)
    assert warnings() == []
    ranks.spend(90.0, lambda rank, at: int(at) + 48 * rank)
    [warning] = warnings()
    assert warning.startswith("rank 1 is at epoch 0, step ")


def test_only_half_a_minute_without_a_break_is_drift(warnings: Callable[[], list[str]]) -> None:
    ranks = Ranks([0, 0])
    for _ in range(4):  # rank 0 evaluates alone, and rank 1 waits for it in a collective
        ranks.spend(25.0, lambda rank, _: 40 - 30 * rank)
        ranks.spend(5.0, lambda _, __: 40)
    assert warnings() == []


def test_an_epoch_that_was_broken_off_is_compared_with_nothing(warnings: Callable[[], list[str]]) -> None:
    """Rank 0 evaluates for a minute, while rank 1 has restarted the epoch and waits with its first batch."""
    ranks = Ranks([0, 0])
    ranks.spend(10.0, lambda _, at: 10 * int(at))
    ranks.spend(60.0, lambda rank, _: 1 if rank else None)
    ranks.spend(60.0, lambda rank, at: int(at) - 50 if rank == 0 else int(at) - 49)
    assert warnings() == []


def test_a_rank_stays_at_the_end_of_its_ended_epoch(warnings: Callable[[], list[str]]) -> None:
    ranks = Ranks([0, 0])
    ranks.spend(60.0, lambda rank, at: 100 if rank == 0 else min(100, int(at)))
    [warning] = warnings()
    assert warning.startswith("rank 1 is at epoch 0, step ")
    assert "rank 0 is at epoch 0, step 100" in warning


def until(done: Callable[[], object]) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_batches_taken_by_one_rank_alone_and_a_state_saved_then_are_warned_of(tmp_path: Path) -> None:
    datasets.array_file(tmp_path / "r.npy", np.arange(400, dtype="<i8")[:, None])
    with Job(tmp_path, "drifting", [[str(tmp_path / "r.npy"), "1.0"]] * 2) as job:

        def warnings(rank: int) -> list[str]:
            return [line for line in job.stderr(rank).splitlines() if "rank 0 is at" in line]

        job.tell(0, "21")
        job.tell(1, "31")
        assert (job.line(0), job.line(1)) == ("21\n", "31\n")
        until(lambda: warnings(1))
        [warning] = warnings(1)
        assert warning.startswith("rank 1 is at epoch 0, step 31, and rank 0 is at epoch 0, step 21, for ")

        def saved() -> list[str]:
            job.tell(0, "save")
            assert job.line(0) == "21\n"
            return warnings(0)

        until(saved)
        saves = "a state is saved while rank 0 is at epoch 0, step 21, and rank 1 is at epoch 0, step 31: "
        assert warnings(0)[0].startswith(saves)
