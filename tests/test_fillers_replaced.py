"""Fillers that work in a tier which is lost are replaced: what they hold is tried again, nothing waits for the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cachesvc.config import NvmeSpec, Settings
from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.model import RAM, TierName
from cachesvc.daemon.fills import pool
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.processes import jobs
from cachesvc.tiers.checksum import Passing
from tests.faulty_disk import FaultyDisk
from tests.test_kills import Loop

DISK, OTHER = TierName("nvme0"), TierName("nvme1")
BYTES = os.urandom(1 << 16)


class Pool:
    """Fillers, their loop, and the answers of each job."""

    def __init__(self, root: Path, loop: Loop, fillers: FillerPool) -> None:
        self.loop, self.fillers = loop, fillers
        self.answers: dict[object, list[jobs.JobDone]] = {}
        self.inside = root / "memory"
        self.inside.write_bytes(BYTES)
        passing = Passing(len(BYTES))
        passing.add(0, memoryview(BYTES))
        fd = os.open(self.inside, os.O_RDONLY)
        self._digests = jobs.pack_digests(passing.checksums(fd).digests)
        os.close(fd)

    def verify(self, name: object, fd: int, *tiers: TierName) -> None:
        job = partial(jobs.VerifyJob, size_bytes=len(BYTES), digests=self._digests)
        self.fillers.submit(job, (fd,), partial(self._answered, name), tiers)

    def copy(self, name: object, target: int, origin: int, *tiers: TierName) -> None:
        job = partial(jobs.CopyJob, size_bytes=len(BYTES), digests=self._digests)
        self.fillers.submit(job, (target, origin), partial(self._answered, name), tiers)

    def of(self, name: object) -> jobs.JobDone:
        """Its answer, once it is there."""
        self.loop.run_until(lambda: name in self.answers)
        (done,) = self.answers[name]
        return done

    def _answered(self, name: object, answer: jobs.Answer) -> None:
        assert isinstance(answer, jobs.JobDone)
        self.answers.setdefault(name, []).append(answer)

    def pids(self) -> list[int]:
        """Of those that there are, once they have begun."""
        living = [each.process for each in self.fillers._living if not each.builds]
        self.loop.run_until(lambda: all(each.pid for each in living))
        return [each.pid for each in living]


@contextmanager
def a_pool(root: Path, count: int, nvme: tuple[NvmeSpec, ...] = ()) -> Iterator[Pool]:
    loop = Loop()
    settings = Settings(0, nvme, (), str(root), str(root), fillers=count)
    fillers = FillerPool(settings, (), loop.watch, loop.unwatch)
    fillers.start()
    try:
        yield Pool(root, loop, fillers)
    finally:
        fillers.stop()


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)


def test_jobs_of_other_tiers_behind_a_disk_that_hangs_are_tried_again_once(tmp_path: Path) -> None:
    with FaultyDisk(tmp_path) as disk, a_pool(tmp_path, 1) as found:
        (disk.path / "extent").write_bytes(BYTES)
        with opened(disk.path / "extent") as hanging, opened(found.inside) as memory:
            found.verify("before", hanging, DISK)
            assert found.of("before").code == 0
            disk.behave("hang")
            for number in range(jobs.JOBS_AT_ONCE):
                found.verify(number, hanging, DISK)
            found.verify("behind", memory, RAM)
            found.loop.run_until(lambda: found.fillers.busy_s(DISK) > 0.5)
            found.verify("late", hanging, DISK)
            assert found.fillers.busy_s(DISK) > 0.5, "as long as the oldest of them"
            assert found.fillers.busy_s(OTHER) == 0.0
            assert "behind" not in found.answers, "all threads wait for the disk"
            before = found.pids()
            found.fillers.tier_lost(OTHER)
            assert found.pids() == before, "nobody works there"
            began = time.monotonic()
            found.fillers.tier_lost(DISK)
            assert time.monotonic() - began < 1.0
            for name in (*range(jobs.JOBS_AT_ONCE), "behind", "late"):
                done = found.of(name)
                assert (done.code, done.retry, done.lost) == (SourceUnavailable.code, True, False)
            assert found.fillers.busy_s(DISK) == 0.0
            found.verify("again", memory, RAM)
            assert found.of("again").code == 0
            assert not set(found.pids()) & set(before)
            disk.behave("")
        assert all(len(answers) == 1 for answers in found.answers.values())


def test_fillers_that_do_not_work_in_a_lost_tier_stay(tmp_path: Path) -> None:
    with FaultyDisk(tmp_path) as disk, a_pool(tmp_path, 2) as found:
        (disk.path / "extent").write_bytes(BYTES)
        with opened(disk.path / "extent") as hanging, opened(found.inside) as memory:
            disk.behave("hang")
            found.verify("hangs", hanging, DISK)
            other = found.pids()[1]
            found.verify("goes on", memory, RAM)
            found.fillers.tier_lost(DISK)
            assert found.of("goes on").code == 0
            assert found.of("hangs").retry
            assert other in found.pids()
            disk.behave("")


def test_a_filler_that_waits_for_a_disk_gets_no_more_jobs_and_ends_when_it_answers(tmp_path: Path) -> None:
    with FaultyDisk(tmp_path) as disk, a_pool(tmp_path, 1) as found:
        (disk.path / "extent").write_bytes(BYTES)
        with opened(disk.path / "extent") as hanging, opened(found.inside) as memory:
            disk.behave("hang")
            for number in range(jobs.JOBS_AT_ONCE):
                found.verify(number, hanging, DISK)
            (left,) = found.pids()
            found.fillers.retire(DISK)
            found.fillers.retire(OTHER)  # in which it does nothing
            others = [f"goes on {number}" for number in range(jobs.JOBS_AT_ONCE + 1)]
            for each in others:
                found.verify(each, memory, RAM)
            assert [found.of(each).code for each in others] == [0] * len(others), "none waits for the disk"
            assert len(found.pids()) == 2
            disk.behave("")
            for number in range(jobs.JOBS_AT_ONCE):
                assert found.of(number).code == 0, "nothing is lost"
            assert left not in found.pids()
            assert len(found.pids()) == 1


def test_jobs_of_other_tiers_do_not_wait_for_a_disk_that_may_answer_again(tmp_path: Path) -> None:
    with FaultyDisk(tmp_path) as disk, a_pool(tmp_path, 1) as found:
        (disk.path / "extent").write_bytes(BYTES)
        with opened(disk.path / "extent") as hanging, opened(found.inside) as memory:
            disk.behave("hang")
            for number in range(jobs.JOBS_AT_ONCE):
                found.verify(number, hanging, DISK)
            found.verify("behind", memory, RAM)
            found.fillers.retire(DISK)
            done = found.of("behind")
            assert (done.code, done.retry) == (SourceUnavailable.code, True)
            found.fillers.retire(DISK)  # again: nobody waits for it any more
            disk.behave("")
            for number in range(jobs.JOBS_AT_ONCE):
                assert found.of(number).code == 0
            found.loop.run_until(lambda: not found.pids())  # it was done behind them, which nobody hears of
        assert all(len(answers) == 1 for answers in found.answers.values())


@pytest.mark.slow
@pytest.mark.parametrize("disks", [0, 1])
def test_fillers_that_cannot_be_killed_are_bounded(tmp_path: Path, disks: int) -> None:
    most = pool.MAX_HUNG + disks
    nvme = tuple(NvmeSpec(str(tmp_path), 1, 0.0) for _ in range(disks))
    with FaultyDisk(tmp_path) as disk, a_pool(tmp_path, 1, nvme) as found:
        (disk.path / "extent").write_bytes(BYTES)
        with opened(disk.path / "extent") as hanging, opened(found.inside) as memory:
            disk.behave("hang")
            for number in range(most):
                found.verify(("started", number), memory, RAM)
                assert found.of(("started", number)).code == 0
                found.copy(number, hanging, memory, DISK)  # a write that began cannot be killed
                found.loop.run_until(lambda: found.fillers.busy_s(DISK) > 0.5)
                found.fillers.tier_lost(DISK)
                assert found.of(number).retry
            found.verify("refused", memory, RAM)
            assert "hang in the kernel" in found.of("refused").message
            disk.behave("")
            deadline = time.monotonic() + 10.0
            while any(each.code is None for each in found.fillers._dying) and time.monotonic() < deadline:
                found.fillers._forks.wait(found.fillers._dying[0], 0.05)
            found.verify("again", memory, RAM)
            assert found.of("again").code == 0
