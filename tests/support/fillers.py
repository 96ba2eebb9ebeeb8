"""A pool of fillers under a test."""

from __future__ import annotations

import os
import select
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from cachesvc.config import NvmeSpec, Settings
from cachesvc.core.model import TierName
from cachesvc.daemon.fills.pool import Fillers
from cachesvc.daemon.processes import jobs
from cachesvc.tiers.checksum import Passing
from testbed import WAIT_S

BYTES = os.urandom(1 << 16)


class Loop:
    """As much of the event loop as fillers need."""

    def __init__(self) -> None:
        self._callbacks: dict[int, Callable[[], None]] = {}
        self.watch, self.unwatch = self._callbacks.__setitem__, self._callbacks.pop

    def run_until(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < deadline
            for fd in select.select(list(self._callbacks), [], [], 1.0)[0]:
                self._callbacks[fd]()


class Pool:
    """Fillers, their loop, and the answers of each job."""

    def __init__(self, root: Path, loop: Loop, fillers: Fillers) -> None:
        self.loop, self.fillers = loop, fillers
        self.answers: dict[object, list[jobs.Done]] = {}
        self.inside = root / "memory"
        self.inside.write_bytes(BYTES)
        passing = Passing(len(BYTES))
        passing.add(0, memoryview(BYTES))
        fd = os.open(self.inside, os.O_RDONLY)
        self._digests = jobs.pack_digests(passing.checksums(fd).digests)
        os.close(fd)

    def verify(self, name: object, fd: int, *tiers: TierName) -> None:
        job = partial(jobs.Verify, size_bytes=len(BYTES), digests=self._digests)
        self.fillers.submit(job, (fd,), partial(self._answered, name), tiers)

    def copy(self, name: object, target: int, origin: int, *tiers: TierName) -> None:
        job = partial(jobs.Copy, size_bytes=len(BYTES), digests=self._digests)
        self.fillers.submit(job, (target, origin), partial(self._answered, name), tiers)

    def of(self, name: object) -> jobs.Done:
        """Its answer, once it is there."""
        self.loop.run_until(lambda: name in self.answers)
        (done,) = self.answers[name]
        return done

    def _answered(self, name: object, answer: jobs.Answer) -> None:
        assert isinstance(answer, jobs.Done)
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
    fillers = Fillers(settings, (), loop.watch, loop.unwatch)
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
