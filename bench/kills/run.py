"""A training run: one ledger, and as many lives as it takes."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import psutil

from bench.kills.audit import Audit
from bench.kills.clock import Clock
from bench.kills.ledger import Reader
from bench.kills.node import Node
from bench.kills.remains import Doomed
from bench.kills.trainer import NO_DAEMON, WORKER_LOST, Life, Workers, train

PREFETCHED = 8
"""Batches that may come after a worker died without having been made after it."""
WEIGHTS: dict[Workers, int] = {"none": 3, "thread": 4, "fork": 5, "spawn": 2}


@dataclass(slots=True)
class _Awaited:
    """What a run is to show: so many more batches, since then."""

    kind: str
    since: float
    batches: int
    daemons: int
    """That had been killed by then."""


class Run:
    """Draws how each of its lives works. `faults` are deaths that nobody caused, and starts that never end."""

    def __init__(
        self,
        context: ForkServerContext,
        life: Life,
        audit: Audit,
        node: Node,
        clock: Clock,
        doomed: Doomed,
        seed: int,
    ) -> None:
        self._context, self._life, self._clock, self._doomed = context, life, clock, doomed
        self._node, self._born = node, 0.0
        self._draw = random.Random(seed)
        self._reader = Reader(Path(life.ledger))
        self._process: BaseProcess | None = None
        self._awaited: _Awaited | None = None
        self._bereaved = False
        self.audit = audit
        self.faults: list[str] = []
        self.ended = False

    def start(self, again: _Awaited | None = None) -> None:
        """A new life: no clean-up, another kind of workers perhaps. `again`: it is the next try of that start."""
        draw = self._draw
        (workers,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        self._life = replace(
            self._life, workers=workers, forgiving=draw.random() < 0.5, seed=draw.randrange(1 << 30)
        )
        self._bereaved, self._born = False, time.monotonic()
        since, daemons = (again.since, again.daemons) if again else (self._born, self._daemons())
        self._awaited = _Awaited(self.kind, since, 1, daemons)
        process = self._context.Process(target=train, args=(self._life,))
        process.start()
        self._process = process

    @property
    def kind(self) -> str:
        """The name of this life's row."""
        return f"trainer, {self._life.workers}"

    @property
    def serving(self) -> bool:
        """Whether batches have come since the latest start or loss."""
        return self._awaited is None

    @property
    def torn(self) -> int:
        """Ledger lines that a kill cut."""
        return self._reader.torn

    def poll(self) -> None:
        """Read the ledger; start again what a lost worker has ended."""
        code = None if self._process is None else self._process.exitcode
        for entry in self._reader:
            self.audit.add(entry)
            self._count()
        if self._process is None or code is None:
            return
        self._process.join()
        self._process = None
        if code == 0:
            self.ended = True
            return
        if code == NO_DAEMON and self._awaited and self._node.was_away_since(self._born):
            self.start(again=self._awaited)
            return
        if not (code == WORKER_LOST and self._bereaved):
            self.faults.append(f"{self.audit.run} ended by itself with code {code}: {self.log_end()}")
        self.start()

    def kill(self) -> None:
        """SIGKILL to the trainer; its workers are to end by themselves."""
        assert self._process is not None
        self._clock.killed(self.kind, self.serving)
        self._doomed.add(_family(self._process))
        self._process.kill()
        self._process.join()
        self._process = None
        self.poll()
        self.start()

    def kill_worker(self) -> bool:
        """SIGKILL to one of its worker processes; False where there is none just now."""
        victims = self.workers()
        if not victims:
            return False
        try:
            self._draw.choice(victims).kill()
        except psutil.NoSuchProcess:  # it has ended by itself since
            return False
        kind = f"worker, {self._life.workers}"
        self._clock.killed(kind, self.serving)
        self._bereaved = True
        self._awaited = _Awaited(kind, time.monotonic(), PREFETCHED + 1, self._daemons())
        return True

    def workers(self) -> Sequence[psutil.Process]:
        """Worker processes that live."""
        if self._process is None or self._life.workers not in ("fork", "spawn"):
            return []
        return [child for child in _family(self._process)[1:] if not _tracks(child)]

    def log_end(self) -> str:
        """The last line of what its lives wrote."""
        lines = Path(self._life.log).read_text(errors="replace").splitlines()
        return lines[-1] if lines else "(no log)"

    def abandon(self) -> None:
        """End it, at the end of the drill."""
        if self._process is not None:
            self._doomed.add(_family(self._process))
            self._process.kill()
            self._process.join()
            self._process = None
        self._reader.close()

    def _count(self) -> None:
        if self._awaited is None:
            return
        self._awaited.batches -= 1
        if self._awaited.batches <= 0:
            took_s = time.monotonic() - self._awaited.since
            self._clock.served(self._awaited.kind, took_s, self._daemons() - self._awaited.daemons)
            self._awaited = None

    def _daemons(self) -> int:
        return self._clock.row("daemon").kills


def _family(process: BaseProcess) -> list[psutil.Process]:
    """A process and all below it; empty when it is gone."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _tracks(process: psutil.Process) -> bool:
    """Python's own tracker of semaphores is no worker; it ends with those it serves."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
