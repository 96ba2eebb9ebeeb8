"""The pool of filler processes, seen from the daemon: submit a job, get its answers on the event loop.

Fills run in processes of their own (design D4): eight boto3 threads in the daemon's interpreter would make
its slowest grants 400 times slower. A filler that dies takes its jobs with it: each is answered as failed,
to be tried again, and a new process takes its place.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from cachesvc.config import Settings
from cachesvc.core.errors import SourceUnavailable
from cachesvc.daemon import jobs

log = logging.getLogger(__name__)
Answered = Callable[[jobs.Answer], None]


@dataclass(slots=True)
class _Filler:
    process: subprocess.Popen[bytes]
    channel: socket.socket
    waiting: dict[int, Answered] = field(default_factory=dict)


class Fillers:
    """Spawn before gRPC starts: a child must not inherit its threads.

    `watch(fd, callback)` and `unwatch(fd)` belong to the event loop, on whose thread everything here runs.
    """

    def __init__(
        self,
        settings: Settings,
        watch: Callable[[int, Callable[[], None]], None],
        unwatch: Callable[[int], None],
    ) -> None:
        self._settings = settings
        self._watch = watch
        self._unwatch = unwatch
        self._number = 0
        self._fillers: list[_Filler] = []
        self._builder: _Filler | None = None

    def start(self) -> None:
        """Spawn the fillers, and one more process that parses: a slow index must not hold up fills."""
        self._fillers = [self._spawn() for _ in range(self._settings.fillers)]
        self._builder = self._spawn()

    def submit(
        self, make: Callable[[int], jobs.Job], descriptors: tuple[int, ...], answered: Answered
    ) -> None:
        """Send the job that `make(number)` gives to the least busy filler; builds go to the builder.
        `answered` is called for every answer, and once with `Done`. Descriptors stay the caller's."""
        self._number += 1
        job = make(self._number)
        assert self._builder is not None
        busy = min(self._fillers, key=lambda f: len(f.waiting))
        filler = self._builder if isinstance(job, jobs.Build) else busy
        filler.waiting[job.number] = answered
        try:
            jobs.send(filler.channel, job, descriptors)
        except OSError as error:
            del filler.waiting[job.number]
            answered(self._lost(job.number, error))

    def stop(self) -> None:
        """End every filler; each notices its closed channel, and is killed if it does not."""
        for filler in [*self._fillers, *([self._builder] if self._builder else [])]:
            filler.channel.close()
            filler.process.kill()
            filler.process.wait()
        self._fillers, self._builder = [], None

    def _spawn(self) -> _Filler:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * jobs.MAX_DATAGRAM_BYTES)
        process = subprocess.Popen(
            [sys.executable, "-m", "cachesvc.daemon.filler", str(theirs.fileno())],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "CACHESVC_FILLER": json.dumps(asdict(self._settings))},
        )
        theirs.close()
        filler = _Filler(process, ours)
        self._watch(ours.fileno(), lambda: self._read(filler))
        return filler

    def _read(self, filler: _Filler) -> None:
        try:
            received = jobs.receive(filler.channel)
        except ConnectionError:
            received = None
        if received is None:
            self._replace(filler)
            return
        answer, descriptors = received
        assert not descriptors
        assert isinstance(answer, (jobs.Progress, jobs.Done))
        if isinstance(answer, jobs.Done):
            filler.waiting.pop(answer.number)(answer)
        else:
            filler.waiting[answer.number](answer)

    def _replace(self, filler: _Filler) -> None:
        self._unwatch(filler.channel.fileno())
        filler.channel.close()
        code = filler.process.wait()
        log.warning("a filler process ended by itself", extra={"code": code, "jobs": len(filler.waiting)})
        if filler is self._builder:
            self._builder = self._spawn()
        else:
            self._fillers[self._fillers.index(filler)] = self._spawn()
        for number, answered in filler.waiting.items():
            answered(self._lost(number, f"exit code {code}"))

    @staticmethod
    def _lost(number: int, why: object) -> jobs.Done:
        return jobs.Done(number, SourceUnavailable.code, f"a filler process ended ({why})", retry=True)
