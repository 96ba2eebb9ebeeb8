"""The daemon of a drill, over its lives: started again as it is, with all that the dead one left."""

from __future__ import annotations

import random
import time

import psutil

from bench.kills.clock import Clock
from bench.kills.remains import Doomed
from testbed.node import Daemon

LOOK_EVERY_S = 0.05
"""Asking whether it answers costs a few milliseconds."""


class Node:
    """`faults` are deaths that nobody caused."""

    def __init__(self, daemon: Daemon, clock: Clock, doomed: Doomed, seed: int) -> None:
        self.daemon = daemon
        self._clock, self._doomed = clock, doomed
        self._draw = random.Random(seed)
        self._since: float | None = None
        self._look_at = 0.0
        self.away_until = 0.0
        self.faults: list[str] = []

    def start(self) -> None:
        """Start it; `poll` sees when it serves."""
        self._since = time.monotonic()
        self.daemon.launch()

    @property
    def serving(self) -> bool:
        """Whether the present one has answered."""
        return self._since is None

    def was_away_since(self, moment: float) -> bool:
        """Whether there was no daemon at some time since then."""
        return self._since is not None or self.away_until >= moment

    def poll(self) -> None:
        """Ask it, while it starts."""
        assert self.daemon.process is not None
        if self.daemon.process.poll() is not None:
            tail = self.daemon.log.splitlines()[-1:]
            self.faults.append(
                f"the daemon ended by itself with code {self.daemon.process.returncode}: {tail}"
            )
            self.start()
        now = time.monotonic()
        if self._since is not None and now >= self._look_at:
            self._look_at = now + LOOK_EVERY_S
            if self.daemon.ready():
                self._clock.served("daemon", time.monotonic() - self._since)
                self._since, self.away_until = None, time.monotonic()

    def kill(self) -> None:
        """SIGKILL; fillers and builder are to end by themselves."""
        self._clock.killed("daemon", self.serving)
        self._doomed.add(self._children())
        self.daemon.kill()
        self.start()

    def kill_filler(self) -> bool:
        """SIGKILL to a filler, or the builder; False where there is none just now."""
        victims = self._children()
        if not victims:
            return False
        try:
            self._draw.choice(victims).kill()
        except psutil.NoSuchProcess:  # it has ended by itself since
            return False
        self._clock.killed("filler, builder", True)
        return True

    def _children(self) -> list[psutil.Process]:
        assert self.daemon.process is not None
        return psutil.Process(self.daemon.process.pid).children(recursive=True)
