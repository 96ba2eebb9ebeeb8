"""One rank cannot read its data: every rank raises the same error, or ends where it is blocked."""

from __future__ import annotations

import json
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from cachesvc.core.errors import NotFound, PeerRankFailed
from loader import DataLoader
from loader.job.rank_drift import DriftWatch
from loader.job.rank_failures import BLOCKED_EXIT, Agreement, RankFailureWatch, watched
from loader.job.store import JobStore
from loader.job.topology import Topology
from testbed import WAIT_S
from tests.support import datasets
from tests.support.training.loader_fakes import compiled, in_memory
from tests.support.training.rank import PER_FILE
from tests.support.training.ranks import Job

JOB_S = 60.0


def test_a_failed_read_ends_every_rank_with_its_typed_error(tmp_path: Path) -> None:
    """Rank 1 loses a file. Rank 0 takes no part in collectives and raises; rank 2 is blocked in one."""
    for part in range(9):
        datasets.array_file(tmp_path / "data" / f"{part:02d}.npy", np.full((PER_FILE, 8), part, dtype="<i4"))
    data = str(tmp_path / "data")
    with Job(tmp_path, "rank", [[data, "alone"], [data, "alone"], [data, "together"]]) as job:
        for rank in range(3):
            assert json.loads(job.line(rank)) == {"steps": 3, "watches": 0}
        raised = [json.loads(job.line(rank)) for rank in (0, 1)]
        assert raised[0]["message"] == raised[1]["message"]
        for each in raised:
            assert each["error"] == "PeerRankFailed"
            assert each["cause"] == "NotFound"
            assert each["message"].startswith("rank 1 cannot go on at epoch 0, step 1: NotFound: ")
            assert "04.npy is gone" in each["message"]
            assert each["after_s"] < 10.0
        assert job.processes[2].wait(JOB_S) == BLOCKED_EXIT == PeerRankFailed.code
        last = job.stderr(2)
        assert raised[0]["message"] in last
        assert f"exit code {BLOCKED_EXIT}" in last


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=10))


def watches(store: dist.TCPStore, name: str, peer_failure_s: float = 30.0) -> list[RankFailureWatch]:
    """The watches of a job of two ranks in this process."""
    return [RankFailureWatch(agreed(store, name, rank), peer_failure_s) for rank in range(2)]


def agreed(store: dist.TCPStore, name: str, rank: int) -> Agreement:
    own = JobStore(store).below(name).connected_anew()
    topology = Topology(rank, 2, "test", process=rank, processes=2)
    return Agreement(own, topology, DriftWatch(own, rank, prefetch=0, accumulate=1))


def listening() -> int:
    return sum(thread.name == "cachesvc-peers" for thread in threading.enumerate())


def until(done: Any) -> None:
    deadline = time.monotonic() + WAIT_S
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_all_ranks_raise_the_first_of_two_failures(store: dist.TCPStore) -> None:
    first, second = watches(store, "two")
    with pytest.raises(PeerRankFailed, match="rank 0 cannot go on at step 1: NotFound: a") as one:
        fail(first, second, NotFound("a"), NotFound("b"))
    assert isinstance(one.value.__cause__, NotFound)
    assert isinstance(one.value.cause, NotFound)
    until(lambda: not listening())


def fail(first: RankFailureWatch, second: RankFailureWatch, one: Exception, other: Exception) -> None:
    """Both ranks of the job fail, the second after it has read the failure of the first."""
    late: list[Exception] = []

    def follow() -> None:
        until(lambda: second.failure is not None)
        late.append(second.publish("step 2", other))

    with watched(second, lambda: ""):
        thread = threading.Thread(target=follow)
        thread.start()
        try:
            with watched(first, lambda: "step 1"):
                raise one
        finally:
            thread.join()
            assert "step 1: NotFound: a" in str(late[0])


def test_a_users_exception_is_raised_unchanged_and_reported_to_other_ranks(store: dist.TCPStore) -> None:
    first, second = watches(store, "own")
    with watched(second, lambda: ""):
        with pytest.raises(ZeroDivisionError), watched(first, lambda: "step 1"):
            raise ZeroDivisionError("in a transform\nand more")
        with pytest.raises(PeerRankFailed, match=r"rank 0 .* ZeroDivisionError: in a transform$"):
            second.check()
    until(lambda: not listening())


class Spoilt(ValueError):
    """An exception of a user, whose message has several lines."""


def explode(record: torch.Tensor) -> torch.Tensor:
    try:
        raise KeyError("lost")
    except KeyError as error:
        raise Spoilt(f"record {int(record[0])} is spoilt\nand more: of it") from error


def say_nothing(record: torch.Tensor) -> torch.Tensor:
    raise ZeroDivisionError


@pytest.mark.parametrize("workers", ["process", "thread"])
@pytest.mark.parametrize(
    ("transform", "reported"), [(explode, "Spoilt: record 0 is spoilt"), (say_nothing, "ZeroDivisionError: ")]
)
def test_an_error_of_a_worker_is_reported_with_the_workers_text(
    store: dist.TCPStore, tmp_path: Path, workers: Any, transform: Any, reported: str
) -> None:
    datasets.array_file(tmp_path / "r.bin", np.arange(8, dtype="<i8").reshape(8, 1))
    link = compiled(tmp_path / "r.bin", tmp_path, format="records", dtype="(1,)i8")
    loader = DataLoader(in_memory(link, transform=transform), num_workers=1, worker_type=workers)
    first, second = watches(store, f"worker-{workers}-{reported}")
    with watched(second, lambda: ""):
        with pytest.raises((Spoilt, ZeroDivisionError), match="Caught"), watched(first, lambda: "step 0"):
            next(iter(loader))
        with pytest.raises(PeerRankFailed) as raised:
            second.check()
    assert str(raised.value) == f"rank 0 cannot go on at step 0: {reported}"
    until(lambda: not listening())


def leave(record: torch.Tensor) -> torch.Tensor:
    sys.exit("enough")


def interrupt(record: torch.Tensor) -> torch.Tensor:
    raise KeyboardInterrupt


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(
    ("transform", "reported"), [(leave, "SystemExit: enough"), (interrupt, "KeyboardInterrupt: ")]
)
def test_a_rank_that_a_transform_ends_reports_it_to_the_others(
    store: dist.TCPStore, tmp_path: Path, workers: int, transform: Any, reported: str
) -> None:
    datasets.array_file(tmp_path / "r.bin", np.arange(8, dtype="<i8").reshape(8, 1))
    link = compiled(tmp_path / "r.bin", tmp_path, format="records", dtype="(1,)i8")
    loader = DataLoader(in_memory(link, transform=transform), num_workers=workers, worker_type="thread")
    first, second = watches(store, f"left-{workers}-{reported}")
    with watched(second, lambda: ""):
        with pytest.raises((SystemExit, KeyboardInterrupt)), watched(first, lambda: "step 0"):
            next(iter(loader))
        if workers or transform is leave:
            with pytest.raises(PeerRankFailed) as raised:
                second.check()
            assert str(raised.value) == f"rank 0 cannot go on at step 0: {reported}"
        else:
            assert second.failure is None  # as after Ctrl-C
    until(lambda: not listening())


def test_an_abandoned_iteration_reports_nothing(store: dist.TCPStore) -> None:
    first, second = watches(store, "broken off")

    def batches() -> Any:
        with watched(first, lambda: ""):
            yield 0

    with watched(second, lambda: ""):
        begun = batches()
        next(begun)
        begun.close()
    until(lambda: not listening())
    assert second.failure is None


def test_a_watch_ends_when_all_ranks_have_ended_and_not_before(store: dist.TCPStore) -> None:
    first, second = watches(store, "end")
    with watched(second, lambda: ""):
        with watched(first, lambda: ""):
            pass
        assert listening() == 2
    until(lambda: not listening())


def test_a_failure_in_an_additional_iteration_reaches_other_ranks(store: dist.TCPStore) -> None:
    """Rank 0 alone began one more iteration, to print a batch, say."""
    ahead = agreed(store, "ahead", 0)
    with watched(RankFailureWatch(ahead, 30.0), lambda: ""):
        pass
    first = RankFailureWatch(ahead, 30.0)
    second = RankFailureWatch(agreed(store, "ahead", 1), 30.0)
    with watched(second, lambda: ""):
        with pytest.raises(PeerRankFailed), watched(first, lambda: "step 1"):
            raise NotFound("a")
        with pytest.raises(PeerRankFailed, match="rank 0 cannot go on at step 1: NotFound: a"):
            second.check()
    until(lambda: not listening())


def test_additional_iterations_receive_failures_and_end_no_rank_that_has_raised(
    store: dist.TCPStore,
) -> None:
    ahead = agreed(store, "hears", 0)
    looked, first = RankFailureWatch(ahead, 1.0), RankFailureWatch(ahead, 1.0)
    with watched(looked, lambda: ""):
        pass
    second = RankFailureWatch(agreed(store, "hears", 1), 30.0)
    with watched(first, lambda: ""):
        with pytest.raises(PeerRankFailed), watched(second, lambda: "step 1"):
            raise NotFound("a")
        until(lambda: looked.failure is not None and first.failure is not None)
        with pytest.raises(PeerRankFailed, match="rank 1 cannot go on at step 1: NotFound: a"):
            first.check()
    until(lambda: not listening())
    assert ahead.store.count("heard") == 2


def test_without_a_job_there_is_no_watch() -> None:
    with pytest.raises(NotFound), watched(None, lambda: ""):
        raise NotFound("as it is")
    assert not listening()
