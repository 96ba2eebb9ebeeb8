"""The pool of filler processes: submit a job, get its answers on the event loop.

Fills run in processes of their own: eight boto3 threads in the daemon's interpreter make its slowest grants 400 times
slower. When a filler dies, each of its jobs is answered as failed, to be retried. The next job starts a new process, so
a filler that dies at once costs no more than the retries, whose pauses grow. A filler that hangs in the kernel may
survive its SIGKILL: it is replaced at once, and reaped when it is dead. No new fillers start while `MAX_HUNG` of
them, plus all fillers once for each disk, hang.
"""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from cachesvc.config import Settings, requester_pays, section_of
from cachesvc.core.errors import CacheError, CorruptData, SourceUnavailable
from cachesvc.core.limits import BUILD_TRIES
from cachesvc.core.model import TierName
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.datagrams import send
from cachesvc.daemon.processes.fork_server import CANNOT_FORK, DEATH_S, Child, ForkServer
from cachesvc.sources.paces import SharedHedges, new_paces
from cachesvc.sources.timed_reads import SourceCounters
from cachesvc.system.footprint import largest_ram_bytes
from cachesvc.system.memory import allowed_bytes, oom_kills

log = logging.getLogger(__name__)
STOP_S = 2.0
MAX_HUNG = 8
BUILD_CRASHED = "a process crashed while it read the data; an object of this dataset is probably damaged"
CRASHES = frozenset((-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS, -signal.SIGILL, -signal.SIGFPE))
"""Exit codes of a process whose own code ended it: pyarrow aborts on some damaged Parquet files."""
TOGETHER_S = 1.0
"""Deaths within this time of a counted kill are put down to it, since the kernel may kill several processes at once."""
OnAnswer = Callable[[jobs.Answer], None]


@dataclass(frozen=True, slots=True)
class _WaitingJob:
    """A submitted job: the callback, the tiers that it reads or writes, and the time of its submission."""

    answered: OnAnswer
    tiers: tuple[TierName, ...]
    since: float


@dataclass(slots=True, eq=False)
class _Filler:
    process: Child
    channel: socket.socket
    builds: bool
    waiting: dict[int, _WaitingJob] = field(default_factory=dict)
    forks: ForkServer = field(kw_only=True)
    retiring: bool = False
    """The process gets no more jobs and ends after its last one: its threads wait for a disk that stalls, or it is
    outdated."""
    outdated: bool = False
    """It has former settings."""

    def works_in(self, tier: TierName) -> bool:
        return any(tier in each.tiers for each in self.waiting.values())


class OomKills:
    """Compares the kernel's count of kills with the previous count; the kernel counts a kill before its process is dead."""

    def __init__(
        self, count: Callable[[], int] = oom_kills, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._count, self._clock = count, clock
        self._known = count()
        self._until = clock()

    def ended(self, code: int | None) -> bool:
        """Tell whether a process that just ended with this exit code was killed for memory.

        `code` is None where the process has not died yet, such as while the kernel frees its memory.
        """
        if code not in (None, -signal.SIGKILL):
            return False
        count = self._count()
        if count > self._known:
            self._known, self._until = count, self._clock() + TOGETHER_S
        return self._clock() < self._until


class FillerPool:
    """The fillers and the builder, which one fork server starts. Runs on the event loop's thread.

    `roots` are the real paths that files must lie under (`Allowlist.roots`). Fillers do not resolve them, since an
    unrelated mount may hang. `watch(fd, callback)` and `unwatch(fd)` are the event loop's.
    """

    def __init__(
        self,
        settings: Settings,
        roots: tuple[str, ...],
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._paces = new_paces()
        self.hedges = SharedHedges(settings.hedge_share, self._paces.fileno())
        """The budget of hedges, which the fillers have too."""
        self._watch = watch
        self._unwatch = unwatch
        self._forks = self._fork_server(roots)
        self._oom = OomKills()
        # A disk that hangs may keep all fillers of that moment, and new ones must serve the other tiers.
        self._max_hung = MAX_HUNG + settings.fillers * len(settings.nvme)
        self._number = 0
        self._living: list[_Filler] = []
        self._dying: list[Child] = []
        self.source_requests = SourceCounters()
        """Requests of all fillers to sources, except those of the last second."""

    def start(self) -> None:
        """Start the fillers, and a builder, so that a slow build does not delay fills.

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

    def renew(self, settings: Settings, roots: tuple[str, ...]) -> None:
        """Use processes with other settings from now on; each old one ends after its last job. The number of fillers
        stays. Raises OSError, and changes nothing, where the new processes cannot be forked."""
        before = self._settings, self._forks
        self._settings = replace(settings, fillers=self._settings.fillers)
        self._forks = self._fork_server(roots)
        try:
            self._forks.start()
        except OSError:
            self._settings, self._forks = before
            raise
        self.hedges.share = settings.hedge_share
        for filler in self._living.copy():
            filler.retiring = filler.outdated = True
            self._end_idle(filler)

    def pays_for(self, uri: str) -> bool:
        """Tell whether requests for an object are ones that their sender pays for."""
        return uri.startswith("s3:") and requester_pays(section_of(uri, self._settings.source))

    def _fork_server(self, roots: tuple[str, ...]) -> ForkServer:
        paces = self._paces.fileno()
        # Of `filler.Given`, whose module imports a lot.
        given = {"settings": self._settings, "roots": roots, "paces": paces}
        return ForkServer("cachesvc.daemon.fills.filler", given, (paces,), self._watch, self._unwatch)

    def submit(
        self,
        job: jobs.Job,
        descriptors: tuple[int, ...],
        answered: OnAnswer,
        tiers: tuple[TierName, ...] = (),
    ) -> None:
        """Send a job, which works in `tiers`, to the least busy filler, a build to the builder.

        `answered` is called for every answer, exactly once with `JobDone`. Descriptors stay the caller's.
        """
        self._number += 1
        try:
            filler = self._least_busy(builds=isinstance(job, jobs.BuildJob))
        except OSError as error:
            message = (
                f"no filler process can be started ({error.strerror}); try again, and see the daemon's log"
            )
            answered(jobs.JobDone(SourceUnavailable.code, message, retry=True))
            return
        filler.waiting[self._number] = _WaitingJob(answered, tiers, time.monotonic())
        try:
            send(filler.channel, jobs.Submitted(self._number, job), descriptors)
        except OSError:
            self._filler_died(filler)  # before the loop has seen it; answers this job too

    def build(self, job: jobs.BuildJob, answered: OnAnswer, tries: int = BUILD_TRIES) -> None:
        """Send a job to the builder, and again to its replacement when it dies, `tries` times in all."""

        def on_answer(answer: jobs.Answer) -> None:
            if isinstance(answer, jobs.JobDone) and answer.lost and tries > 1:
                self.build(job, answered, tries - 1)
            elif isinstance(answer, jobs.JobDone) and answer.crashed:
                answered(jobs.JobDone(CorruptData.code, BUILD_CRASHED, crashed=True))
            else:
                answered(answer)

        self.submit(job, (), on_answer)

    def busy_s(self, tier: TierName) -> float:
        """Age in seconds of the oldest job in a tier, including its wait for the source; 0 without one."""
        waiting = (each for filler in self._living for each in filler.waiting.values() if tier in each.tiers)
        now = time.monotonic()
        return now - min((each.since for each in waiting), default=now)

    def retire(self, tier: TierName) -> None:
        """Replace the fillers that work in a stalled tier; each ends after its last job there.

        Their jobs in other tiers are answered as failed, since all their threads may wait for the stalled disk.
        """
        message = f"the filler process also works in {tier}, which does not answer; try again"
        others: list[_WaitingJob] = []
        for filler in [each for each in self._living if each.works_in(tier)]:
            filler.retiring = True
            for number, waiting in filler.waiting.items():
                if tier not in waiting.tiers:
                    others.append(waiting)
                    filler.waiting[number] = _WaitingJob(lambda _: None, (), waiting.since)
        for waiting in others:
            waiting.answered(jobs.JobDone(SourceUnavailable.code, message, retry=True))

    def tier_lost(self, tier: TierName) -> None:
        """Kill and replace every filler that works in a lost tier: all its threads may hang with the disk, and jobs of
        other tiers wait for these threads."""
        hung = [each for each in self._living if each.works_in(tier)]
        for filler in hung:  # before any answer, which may submit the next job
            self._drop(filler)
        deadline = time.monotonic() + DEATH_S
        for filler in hung:
            code = self._reap(filler, max(0.0, deadline - time.monotonic()))
            extra = {"tier": tier, "code": code, "jobs": len(filler.waiting)}
            log.warning("a filler process that works in a lost tier is replaced", extra=extra)
        message = f"the filler process also worked in {tier}, which is lost; try again"
        for filler in hung:
            for waiting in filler.waiting.values():
                waiting.answered(jobs.JobDone(SourceUnavailable.code, message, retry=True))

    def stop(self, wait: bool = True) -> None:
        """End every filler and, with `wait`, wait up to `STOP_S` for their ends."""
        ending, self._living = self._living, []
        self.hedges.share = 0.0
        self._paces.close()
        for filler in ending:
            filler.channel.close()
        for forks in {
            id(each): each for each in (self._forks, *(filler.forks for filler in ending))
        }.values():
            forks.close(STOP_S if wait else 0.0)

    def _least_busy(self, builds: bool) -> _Filler:
        """Raises OSError where no filler runs and none can be started."""
        try:
            self._fill_up(builds)
        except OSError as error:
            if not any(filler.builds == builds for filler in self._living):
                raise
            log.warning("a filler process cannot be started", extra={"error": error.strerror})
        found = (filler for filler in self._living if filler.builds == builds)
        # A filler that has not started comes last: perhaps it cannot be forked.
        return min(found, key=lambda filler: (filler.retiring, not filler.process.pid, len(filler.waiting)))

    def _fill_up(self, builds: bool) -> None:
        self._dying = [process for process in self._dying if process.code is None]
        wanted = 1 if builds else self._settings.fillers
        of_kind = [filler for filler in self._living if filler.builds == builds]
        retiring = sum(filler.retiring for filler in of_kind)
        stalled = sum(filler.retiring and not filler.outdated for filler in of_kind)
        for _ in range(wanted - len(of_kind) + retiring):
            if len(self._dying) + stalled >= self._max_hung:
                raise OSError(
                    errno.EAGAIN,
                    f"{self._max_hung} processes hang in the kernel; look at the source's mount and at lost tiers",
                )
            filler = _Filler(*self._forks.fork(), builds, forks=self._forks)
            self._living.append(filler)
            self._watch(filler.channel.fileno(), partial(self._read, filler))

    def _read(self, filler: _Filler) -> None:
        message, descriptors = jobs.receive_answer.until_end(filler.channel)
        for fd in descriptors:  # none is expected
            os.close(fd)
        if isinstance(message, jobs.SourceRequests):
            self.source_requests += message.counters
        elif message is None or message.number not in filler.waiting:
            self._filler_died(filler)
        elif isinstance(message.answer, jobs.BuildProgress):
            filler.waiting[message.number].answered(message.answer)
        else:
            filler.waiting.pop(message.number).answered(message.answer)
            self._end_idle(filler)

    def _end_idle(self, filler: _Filler) -> None:
        """End a retiring filler without jobs, and a former fork server with its last child."""
        if filler.retiring and not filler.waiting and filler in self._living:
            self._drop(filler)
            self._reap(filler, DEATH_S)

    def _filler_died(self, filler: _Filler) -> None:
        self._drop(filler)
        code = self._reap(filler, DEATH_S)
        killed = self._killed_for_memory() if self._oom.ended(code) else ""
        message = killed or "a filler process ended unexpectedly"
        log.warning(message, extra={"code": code, "jobs": len(filler.waiting)})
        for waiting in filler.waiting.values():
            waiting.answered(_unanswered(code, killed, len(filler.waiting) == 1))

    def _killed_for_memory(self) -> str:
        largest = largest_ram_bytes(allowed_bytes(), self._settings.own_bytes)
        sensible = self._settings.extent_bytes <= largest < self._settings.ram_bytes
        lower = f"lower --ram to {largest >> 20}MiB" if sensible else "lower --ram"
        return f"a filler was killed by the kernel's OOM killer: {lower}, or raise the cgroup's memory limit"

    def _drop(self, filler: _Filler) -> None:
        self._living.remove(filler)
        self._unwatch(filler.channel.fileno())
        filler.channel.close()
        filler.forks.kill(filler.process)  # it may have closed its channel and still run

    def _reap(self, filler: _Filler, wait_s: float) -> int | None:
        """Return the exit code; None where the process hangs in the kernel."""
        code = filler.forks.wait(filler.process, wait_s)
        if code is None:
            self._dying.append(filler.process)
        if filler.forks is not self._forks and not any(each.forks is filler.forks for each in self._living):
            filler.forks.close(0.0)
        return code


def _unanswered(code: int | None, killed: str, alone: bool) -> jobs.JobDone:
    """The answer for a job whose process ended without one. `killed` is the message where it was killed for memory;
    `alone` means that the process had no other job."""
    if killed:
        return jobs.JobDone(SourceUnavailable.code, killed, retry=True, lost=True)
    if code == CANNOT_FORK:
        message = "no filler process can be started; allow more processes or memory, and try again"
        return jobs.JobDone(SourceUnavailable.code, message, retry=True)
    why = "exit code not known yet" if code is None else f"exit code {code}"
    message = f"the filler process ended ({why}); try again, and see the daemon's log"
    crashed = alone and code in CRASHES
    return jobs.JobDone(SourceUnavailable.code, message, retry=True, lost=True, crashed=crashed)
