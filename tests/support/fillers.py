"""A real pool of fillers with a minimal event loop."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cachesvc.config import NvmeSpec, Settings
from cachesvc.core.model import RAM, TierName
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.fork_server import Child, ForkServer
from cachesvc.tiers.checksum import StreamedChecksums
from testbed import WAIT_S

BYTES = os.urandom(1 << 16)


class Loop:
    """The part of the event loop that fillers need."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.watch = self._callbacks.__setitem__

    def unwatch(self, fd: int) -> None:
        del self._callbacks[fd]

    def run_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < deadline
            for fd in select.select(list(self._callbacks), [], [], 1.0)[0]:
                self._callbacks[fd]()


class Pool:
    """Fillers, their loop, and the answers of each job."""

    def __init__(self, root: Path, loop: Loop, fillers: FillerPool) -> None:
        self.loop, self.fillers = loop, fillers
        self.answers: dict[object, list[jobs.JobDone]] = {}
        self.inside = root / "memory"
        self.inside.write_bytes(BYTES)
        passing = StreamedChecksums(len(BYTES))
        passing.add(0, memoryview(BYTES))
        self.memory = os.open(self.inside, os.O_RDWR)
        self._digests = passing.checksums(self.memory).digests

    def verify(self, name: object, fd: int, *tiers: TierName) -> None:
        job = jobs.VerifyJob(len(BYTES), self._digests)
        self.fillers.submit(job, (fd,), partial(self._answered, name), tiers)

    def copy(self, name: object, target: int, origin: int, *tiers: TierName) -> None:
        job = jobs.CopyJob(len(BYTES), self._digests)
        self.fillers.submit(job, (target, origin), partial(self._answered, name), tiers)

    def of(self, name: object) -> jobs.JobDone:
        """Wait for a job's answer and return it."""
        self.loop.run_until(lambda: name in self.answers)
        (done,) = self.answers[name]
        return done

    def works(self) -> bool:
        """Give the fillers a job in memory; tell whether it was done."""
        name = object()
        self.verify(name, self.memory, RAM)
        return self.of(name).code == 0

    def _answered(self, name: object, answer: jobs.Answer) -> None:
        assert isinstance(answer, jobs.JobDone)
        self.answers.setdefault(name, []).append(answer)

    def processes(self, builds: bool = False) -> list[Child]:
        """The fillers that live, without the builder, or the builder."""
        return [each.process for each in self.fillers._living if each.builds == builds]

    def pids(self) -> list[int]:
        """Process ids of the fillers, once all have started."""
        living = self.processes()
        self.loop.run_until(lambda: all(each.pid for each in living))
        return [each.pid for each in living]

    def lives(self, pid: int) -> bool:
        """Tell whether the pool takes a filler for alive."""
        return pid in [each.pid for each in self.processes()]

    @property
    def forks(self) -> ForkServer:
        """The fork server of the fillers."""
        return self.fillers._forks


@contextmanager
def a_pool(root: Path, count: int, nvme: tuple[NvmeSpec, ...] = ()) -> Iterator[Pool]:
    loop = Loop()
    settings = Settings(0, nvme, (), str(root), str(root), fillers=count)
    fillers = FillerPool(settings, (), loop.watch, loop.unwatch)
    fillers.start()
    found = Pool(root, loop, fillers)
    try:
        yield found
    finally:
        fillers.stop()
        os.close(found.memory)


@contextmanager
def opened(path: Path) -> Iterator[int]:
    fd = os.open(path, os.O_RDWR)
    try:
        yield fd
    finally:
        os.close(fd)
