"""The pool of filler processes, seen from the daemon: submit a job, get its answers on the event loop.

Fills run in processes of their own (design D4): eight boto3 threads in the daemon's interpreter would make
its slowest grants 400 times slower. A filler that dies takes its jobs with it: each is answered as failed,
to be tried again. The next job starts a new process, so one that dies at once costs no more than the retries,
whose pauses grow. One that hangs in the kernel may outlive its SIGKILL: it is replaced all the same, and reaped when
it is dead; `MAX_HUNG` of them, and all fillers once more for each disk, and there are no new ones.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial

from cachesvc.config import Settings
from cachesvc.core.errors import CacheError, SourceUnavailable
from cachesvc.core.model import TierName
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.fork_server import CANNOT_FORK, DEATH_S, Child, ForkServer
from cachesvc.daemon.processes.oom_kills import OomKills
from cachesvc.sources.paces import new_paces
from cachesvc.sources.resilient import SourceCounters
from cachesvc.system.footprint import largest_ram_bytes
from cachesvc.system.memory import allowed_bytes

log = logging.getLogger(__name__)
STOP_S = 2.0
MAX_HUNG = 8
BUILD_TRIES = 4
"""A builder that was killed is no reason to fail an opening, nor are two; data that ends four is."""
Answered = Callable[[jobs.Answer], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    """Who waits for a job, the tiers that it reads or writes, and since when."""

    answered: Answered
    tiers: tuple[TierName, ...]
    since: float


@dataclass(slots=True, eq=False)
class _Filler:
    process: Child
    channel: socket.socket
    builds: bool
    waiting: dict[int, _Waiting] = field(default_factory=dict)
    left: bool = False
    """It ends with what it has to do: that waits for a disk, and so may what it would be given next."""

    def works_in(self, tier: TierName) -> bool:
        return any(tier in each.tiers for each in self.waiting.values())


def _nobody_waits(_: jobs.Answer) -> None: ...


class Fillers:
    """`roots`: real paths that files must lie under
    (`Allowlist.roots`); fillers look none of them up, since a mount may hang that a job has nothing to do with.

    `watch(fd, callback)` and `unwatch(fd)` belong to the event loop, on whose thread everything here runs.
    """

    def __init__(
        self,
        settings: Settings,
        roots: tuple[str, ...],
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._paces = new_paces()
        paces = self._paces.fileno()
        given = json.dumps({**asdict(settings), "roots": roots, "paces": paces})
        self._forks = ForkServer("cachesvc.daemon.fills.filler", given, (paces,), watch, unwatch)
        self._watch = watch
        self._unwatch = unwatch
        self._clock = clock
        self._oom = OomKills()
        # Each disk that hangs may keep all fillers of its time, and the others must go on.
        self._max_hung = MAX_HUNG + settings.fillers * len(settings.nvme)
        self._number = 0
        self._living: list[_Filler] = []
        self._dying: list[Child] = []
        self.asked = SourceCounters()
        """What all of them asked of the sources, but for the last second."""
        self.left_alone = dict.fromkeys(settings.peer, 0)
        """How often they left each peer alone."""

    def start(self) -> None:
        """Start the fillers, and one more process that parses: a slow index must not hold up fills.

        Raises CacheError when no process can be started.
        """
        try:
            self._fill_up(builds=False)
            self._fill_up(builds=True)
        except OSError as error:
            self.stop()
            raise CacheError(
                f"no filler process can be started ({error.strerror}); allow more processes or memory"
            ) from None

    def submit(
        self,
        make: Callable[[int], jobs.Job],
        descriptors: tuple[int, ...],
        answered: Answered,
        tiers: tuple[TierName, ...] = (),
    ) -> None:
        """Send the job that `make(number)` gives, which works in `tiers`, to the least busy filler; builds go to the
        builder. `answered` is called for every answer, and once with `Done`. Descriptors stay the caller's."""
        self._number += 1
        job = make(self._number)
        try:
            filler = self._least_busy(builds=isinstance(job, jobs.BuildJob))
        except OSError as error:
            message = (
                f"no process can be started for it ({error.strerror}); try again, and see the daemon's log"
            )
            answered(jobs.JobDone(job.number, SourceUnavailable.code, message, retry=True))
            return
        filler.waiting[job.number] = _Waiting(answered, tiers, self._clock())
        try:
            jobs.send(filler.channel, job, descriptors)
        except OSError:
            self._gone(filler)  # before the loop heard of it; answers this job too

    def build(
        self, make: Callable[[int], jobs.BuildJob], answered: Answered, tries: int = BUILD_TRIES
    ) -> None:
        """Send a job to the builder, and to the next one when that ends in mid-job."""

        def heard(answer: jobs.Answer) -> None:
            if isinstance(answer, jobs.JobDone) and answer.lost and tries > 1:
                self.build(make, answered, tries - 1)
            else:
                answered(answer)

        self.submit(make, (), heard)

    def busy_s(self, tier: TierName) -> float:
        """How long the oldest job in a tier has been, its wait for the source included; 0 without one."""
        waiting = (each for filler in self._living for each in filler.waiting.values() if tier in each.tiers)
        now = self._clock()
        return now - min((each.since for each in waiting), default=now)

    def leave(self, tier: TierName) -> None:
        """Give no more jobs to the fillers that work in a tier: others take their place. What they were to do in other
        tiers is answered as failed: all their threads may wait for that disk."""
        message = f"the process that was to do it works in {tier} too, which does not answer; try again"
        others: list[tuple[int, _Waiting]] = []
        for filler in [each for each in self._living if each.works_in(tier)]:
            filler.left = True
            for number, waiting in filler.waiting.items():
                if tier not in waiting.tiers:
                    others.append((number, waiting))
                    filler.waiting[number] = _Waiting(_nobody_waits, (), waiting.since)
        for number, waiting in others:
            waiting.answered(jobs.JobDone(number, SourceUnavailable.code, message, retry=True))

    def tier_lost(self, tier: TierName) -> None:
        """Replace every filler that works in a tier: its threads may wait for the disk as long as that hangs, and other
        tiers' jobs for these threads."""
        hung = [each for each in self._living if each.works_in(tier)]
        for filler in hung:  # before anybody is answered, who may send the next job
            self._part_with(filler)
        deadline = time.monotonic() + DEATH_S
        for filler in hung:
            code = self._reap(filler, max(0.0, deadline - time.monotonic()))
            extra = {"tier": tier, "code": code, "jobs": len(filler.waiting)}
            log.warning("a filler process that works in a lost tier is replaced", extra=extra)
        message = f"the process that was to do it worked in {tier} too, which is lost; try again"
        for filler in hung:
            for number, waiting in filler.waiting.items():
                waiting.answered(jobs.JobDone(number, SourceUnavailable.code, message, retry=True))

    def stop(self, wait: bool = True) -> None:
        """End every filler, and wait until it has; without `wait`, whoever inherits them sees their end."""
        ending, self._living = self._living, []
        self._paces.close()
        for filler in ending:
            filler.channel.close()
        self._forks.close(STOP_S if wait else 0.0)  # one that hangs in the kernel holds nothing of ours

    def _least_busy(self, builds: bool) -> _Filler:
        """Raises OSError when there is none and none can be started."""
        try:
            self._fill_up(builds)
        except OSError as error:
            if not any(filler.builds == builds for filler in self._living):
                raise
            log.warning("a filler process cannot be started", extra={"error": error.strerror})
        found = (filler for filler in self._living if filler.builds == builds)
        # One that has not begun may never: none can be forked any more.
        return min(found, key=lambda filler: (filler.left, not filler.process.pid, len(filler.waiting)))

    def _fill_up(self, builds: bool) -> None:
        self._dying = [process for process in self._dying if process.code is None]
        wanted = 1 if builds else self._settings.fillers
        of_kind = [filler for filler in self._living if filler.builds == builds]
        left = sum(filler.left for filler in of_kind)
        for _ in range(wanted - len(of_kind) + left):
            if len(self._dying) + left >= self._max_hung:
                raise OSError(
                    errno.EAGAIN,
                    f"{self._max_hung} processes hang in the kernel; look at the source's mount and at lost tiers",
                )
            filler = _Filler(*self._forks.fork(), builds)
            self._living.append(filler)
            self._watch(filler.channel.fileno(), partial(self._read, filler))

    def _read(self, filler: _Filler) -> None:
        try:
            received = jobs.receive(filler.channel)
        except jobs.RECEIVE_ERRORS:
            received = None
        answer, descriptors = received or (None, [])
        for fd in descriptors:  # none is expected, and none may pile up
            os.close(fd)
        if isinstance(answer, jobs.SourceRequests) and jobs.is_well_typed(answer):
            self.asked += answer
        elif (
            isinstance(answer, jobs.PeerPaused)
            and jobs.is_well_typed(answer)
            and answer.peer in self.left_alone
        ):
            self.left_alone[answer.peer] += 1
        elif (
            not isinstance(answer, (jobs.JobDone, jobs.JobProgress))
            or not jobs.is_well_typed(answer)
            or answer.number not in filler.waiting
        ):
            self._gone(filler)
        elif isinstance(answer, jobs.JobDone):
            filler.waiting.pop(answer.number).answered(answer)
            if filler.left and not filler.waiting and filler in self._living:
                self._part_with(filler)
                self._reap(filler, DEATH_S)
        elif isinstance(answer, jobs.JobProgress):
            filler.waiting[answer.number].answered(answer)

    def _gone(self, filler: _Filler) -> None:
        self._part_with(filler)
        code = self._reap(filler, DEATH_S)
        killed = self._killed_for_memory() if self._oom.ended(code) else ""
        message = killed or "a filler process ended by itself"
        log.warning(message, extra={"code": code, "jobs": len(filler.waiting)})
        for number, waiting in filler.waiting.items():
            waiting.answered(_lost(number, code, killed))

    def _killed_for_memory(self) -> str:
        largest = largest_ram_bytes(allowed_bytes(), self._settings.own_bytes)
        sensible = self._settings.extent_bytes <= largest < self._settings.ram_bytes
        lower = f"lower --ram to {largest >> 20}MiB" if sensible else "lower --ram"
        return f"a filler was killed by the kernel's OOM killer: {lower}, or raise the cgroup's memory limit"

    def _part_with(self, filler: _Filler) -> None:
        self._living.remove(filler)
        self._unwatch(filler.channel.fileno())
        filler.channel.close()
        self._forks.kill(
            filler.process
        )  # it may have closed its channel and live on; no news for one that is dead

    def _reap(self, filler: _Filler, wait_s: float) -> int | None:
        """Its exit code; None where it hangs in the kernel."""
        code = self._forks.wait(filler.process, wait_s)
        if code is None:
            self._dying.append(filler.process)
        return code


def _lost(number: int, code: int | None, killed: str) -> jobs.JobDone:
    """The answer of a process that ended without one; `killed`: for memory, and what mends it."""
    if killed:
        return jobs.JobDone(number, SourceUnavailable.code, killed, retry=True, lost=True)
    if code == CANNOT_FORK:
        message = "no process can be started for it; allow more processes or memory, and try again"
        return jobs.JobDone(number, SourceUnavailable.code, message, retry=True)
    why = "how is not known yet" if code is None else f"exit code {code}"
    message = f"the process that was to do it ended ({why}); try again, and see the daemon's log"
    return jobs.JobDone(number, SourceUnavailable.code, message, retry=True, lost=True)
