"""Fillers that work in a lost or stalled tier are replaced, and their jobs are retried."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from cachesvc.config import NvmeSpec, Settings
from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import RAM, TierName
from cachesvc.daemon.fills.pool import MAX_HUNG, FillerPool
from cachesvc.daemon.processes import jobs
from testbed import WAIT_S
from tests.support.faults.faulty_disk import FaultyDisk
from tests.support.fillers import BYTES, Pool, a_pool, opened

DISK, OTHER = TierName("nvme0"), TierName("nvme1")


@contextmanager
def beside_a_disk(
    root: Path, fillers: int = 1, nvme: tuple[NvmeSpec, ...] = ()
) -> Iterator[tuple[Pool, FaultyDisk, int]]:
    """Fillers, a disk that a test makes hang, and the descriptor of a file there."""
    with FaultyDisk(root) as disk, a_pool(root, fillers, nvme) as found:
        (disk.path / "extent").write_bytes(BYTES)
        with opened(disk.path / "extent") as hanging:
            yield found, disk, hanging


def test_jobs_of_other_tiers_behind_a_disk_that_hangs_are_retried_once(tmp_path: Path) -> None:
    with beside_a_disk(tmp_path) as (found, disk, hanging):
        found.verify("before", hanging, DISK)
        assert found.of("before").code == 0
        disk.behave("hang")
        for number in range(jobs.JOBS_AT_ONCE):
            found.verify(number, hanging, DISK)
        found.verify("behind", found.memory, RAM)
        found.loop.run_until(lambda: found.fillers.busy_s(DISK) > 0.5)
        found.verify("late", hanging, DISK)
        assert found.fillers.busy_s(DISK) > 0.5, "the age of the oldest job"
        assert found.fillers.busy_s(OTHER) == 0.0
        assert "behind" not in found.answers, "all threads wait for the disk"
        before = found.pids()
        found.fillers.tier_lost(OTHER)
        assert found.pids() == before, "no filler works there"
        found.fillers.tier_lost(DISK)
        for name in (*range(jobs.JOBS_AT_ONCE), "behind", "late"):
            done = found.of(name)
            assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, False)
        assert found.fillers.busy_s(DISK) == 0.0
        assert found.works()
        assert not set(found.pids()) & set(before)
        disk.behave("")
        assert all(len(answers) == 1 for answers in found.answers.values())


def test_fillers_that_do_not_work_in_a_lost_tier_are_kept(tmp_path: Path) -> None:
    with beside_a_disk(tmp_path, 2) as (found, disk, hanging):
        disk.behave("hang")
        found.verify("hangs", hanging, DISK)
        other = found.pids()[1]
        found.verify("goes on", found.memory, RAM)
        found.fillers.tier_lost(DISK)
        assert found.of("goes on").code == 0
        assert found.of("hangs").retry
        assert other in found.pids()
        disk.behave("")


def test_a_filler_that_waits_for_a_disk_gets_no_more_jobs_and_ends_when_it_answers(tmp_path: Path) -> None:
    with beside_a_disk(tmp_path) as (found, disk, hanging):
        disk.behave("hang")
        for number in range(jobs.JOBS_AT_ONCE):
            found.verify(number, hanging, DISK)
        (left,) = found.pids()
        found.fillers.retire(DISK)
        found.fillers.retire(OTHER)  # the filler does not work there
        others = [f"goes on {number}" for number in range(jobs.JOBS_AT_ONCE + 1)]
        for each in others:
            found.verify(each, found.memory, RAM)
        assert [found.of(each).code for each in others] == [0] * len(others), "none waits for the disk"
        assert len(found.pids()) == 2
        disk.behave("")
        for number in range(jobs.JOBS_AT_ONCE):
            assert found.of(number).code == 0, "nothing is lost"
        assert left not in found.pids()
        assert len(found.pids()) == 1


def test_jobs_of_other_tiers_do_not_wait_for_a_disk_that_may_answer_again(tmp_path: Path) -> None:
    with beside_a_disk(tmp_path) as (found, disk, hanging):
        disk.behave("hang")
        for number in range(jobs.JOBS_AT_ONCE):
            found.verify(number, hanging, DISK)
        found.verify("behind", found.memory, RAM)
        found.fillers.retire(DISK)
        done = found.of("behind")
        assert (done.code, done.retry) == (SourceUnavailable.code, True)
        found.fillers.retire(DISK)  # a second time, when the job behind has been answered
        disk.behave("")
        for number in range(jobs.JOBS_AT_ONCE):
            assert found.of(number).code == 0
        found.loop.run_until(lambda: not found.pids())  # the job behind was also done; its answer is ignored
        assert all(len(answers) == 1 for answers in found.answers.values())


@pytest.mark.slow
@pytest.mark.parametrize("disks", [0, 1])
def test_fillers_that_cannot_be_killed_are_bounded(tmp_path: Path, disks: int) -> None:
    most = MAX_HUNG + disks
    nvme = tuple(NvmeSpec(str(tmp_path), 1, 0.0) for _ in range(disks))
    with beside_a_disk(tmp_path, 1, nvme) as (found, disk, hanging):
        disk.behave("hang")
        for number in range(most):
            assert found.works()
            found.copy(number, hanging, found.memory, DISK)  # a process in a write cannot be killed
            found.loop.run_until(lambda: found.fillers.busy_s(DISK) > 0.5)
            found.fillers.tier_lost(DISK)
            assert found.of(number).retry
        found.verify("refused", found.memory, RAM)
        assert "hang in the kernel" in found.of("refused").message
        disk.behave("")
        deadline = time.monotonic() + WAIT_S
        while any(each.code is None for each in found.fillers._dying) and time.monotonic() < deadline:
            found.forks.wait(found.fillers._dying[0], 0.05)
        assert found.works()


def test_a_job_without_a_process_fails_without_being_lost(tmp_path: Path) -> None:
    settings = Settings(0, (), (), str(tmp_path), str(tmp_path), fillers=1)
    fillers, answers = FillerPool(settings, (), lambda *_: None, lambda _: None), list[jobs.Answer]()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        fillers.submit(jobs.VerifyJob(1, b""), (), answers.append)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    (done,) = answers
    assert isinstance(done, jobs.JobDone)
    assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, False)
    assert "no filler process can be started" in done.message
