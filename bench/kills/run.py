"""A training run: one ledger, and a new trainer process (a life) after each kill."""

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
from bench.kills.leftovers import Orphans
from bench.kills.node import Node
from bench.kills.trainer import NO_DAEMON, Life, Prepared, Workers, train

PREFETCHED = 8
"""Batches that may arrive after a worker's death although they were made before it."""
WEIGHTS: dict[Workers, int] = {"none": 3, "thread": 4, "fork": 5, "spawn": 2}
PREPARED: dict[Prepared, int] = {"": 2, "even": 1, "uneven": 1}
"""Half of the lives prepare samples; their trainers and workers are the preparers that are killed."""


@dataclass(slots=True)
class _Awaited:
    """A start or loss whose recovery is being timed: it ends when `batches` more batches were committed."""

    kind: str
    since: float
    batches: int
    daemons: int
    """Daemons that had been killed before it."""


class Run:
    """A training run; draws at random how each of its lives works. `faults` are ends that no kill caused."""

    def __init__(
        self,
        context: ForkServerContext,
        life: Life,
        audit: Audit,
        node: Node,
        clock: Clock,
        orphans: Orphans,
        seed: int,
    ) -> None:
        self._context, self._life, self._clock, self._orphans = context, life, clock, orphans
        self._node, self._started_at = node, 0.0
        self._draw = random.Random(seed)
        self._reader = Reader(Path(life.ledger))
        self._process: BaseProcess | None = None
        self._awaited: _Awaited | None = None
        self.audit = audit
        self.faults: list[str] = []
        self.ended = False

    def start(self, again: _Awaited | None = None) -> None:
        """Start a new life without any clean-up, with a newly drawn kind of workers. `again`: the start it retries."""
        draw = self._draw
        (workers,) = draw.choices(list(WEIGHTS), list(WEIGHTS.values()))
        (prepared,) = draw.choices(list(PREPARED), list(PREPARED.values()))
        self._life = replace(self._life, workers=workers, prepared=prepared, seed=draw.randrange(1 << 30))
        self._started_at = time.monotonic()
        since, daemons = (again.since, again.daemons) if again else (self._started_at, self._daemons_killed())
        self._awaited = _Awaited(self.kind, since, 1, daemons)
        process = self._context.Process(target=train, args=(self._life,))
        process.start()
        self._process = process

    @property
    def kind(self) -> str:
        """Name of the table row of this life."""
        return f"trainer, {self._life.workers}{self._preparing}"

    @property
    def _preparing(self) -> str:
        return ", preparing" * bool(self._life.prepared)

    @property
    def serving(self) -> bool:
        """True when enough batches have come since the latest start or loss of a worker."""
        return self._awaited is None

    @property
    def torn(self) -> int:
        """Ledger lines that a kill cut."""
        return self._reader.torn

    def poll(self) -> None:
        """Read the ledger; start a new life when the trainer has ended, unless the run is complete."""
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
        if code == NO_DAEMON and self._awaited and self._node.was_away_since(self._started_at):
            self.start(again=self._awaited)
            return
        self.faults.append(f"{self.audit.run} ended by itself with code {code}: {self.log_end()}")
        self.start()

    def kill(self) -> None:
        """Kill the trainer and start the next life; its workers must end by themselves."""
        assert self._process is not None
        self._clock.killed(self.kind, self.serving)
        self._orphans.add(_family(self._process))
        self._process.kill()
        self._process.join()
        self._process = None
        self.poll()
        self.start()

    def kill_worker(self) -> bool:
        """Kill one worker process; return False when there is none now."""
        victims = self.workers()
        if not victims:
            return False
        try:
            self._draw.choice(victims).kill()
        except psutil.NoSuchProcess:  # it ended by itself meanwhile
            return False
        kind = f"worker, {self._life.workers}{self._preparing}"
        self._clock.killed(kind, self.serving)
        self._awaited = _Awaited(kind, time.monotonic(), PREFETCHED + 1, self._daemons_killed())
        return True

    def workers(self) -> Sequence[psutil.Process]:
        """The living worker processes."""
        if self._process is None or self._life.workers not in ("fork", "spawn"):
            return []
        return [child for child in _family(self._process)[1:] if not _is_resource_tracker(child)]

    def log_end(self) -> str:
        """Last line of the log that all lives share."""
        lines = Path(self._life.log).read_text(errors="replace").splitlines()
        return lines[-1] if lines else "(no log)"

    def end(self) -> None:
        """End the run with the drill, killing a trainer that still runs."""
        if self._process is not None:
            self._orphans.add(_family(self._process))
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
            daemons = self._daemons_killed() - self._awaited.daemons
            self._clock.served(self._awaited.kind, took_s, daemons)
            self._awaited = None

    def _daemons_killed(self) -> int:
        return self._clock.row("daemon").kills


def _family(process: BaseProcess) -> list[psutil.Process]:
    """A process and its descendants; empty when it is gone."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _is_resource_tracker(process: psutil.Process) -> bool:
    """True for Python's resource tracker, which is no worker and ends with the processes it serves."""
    try:
        return "resource_tracker" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return True
