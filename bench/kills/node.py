"""The daemon of a drill: killed, and started again over all that the dead one left."""

from __future__ import annotations

import random
import time
from contextlib import suppress

import psutil

from bench.kills.clock import Clock
from bench.kills.leftovers import Orphans
from testbed.node import Daemon

POLL_INTERVAL_S = 0.05
"""Pause between two checks whether the daemon answers. A check takes a few milliseconds."""


ALONE = 0.5
"""The share of the daemon's kills that leave its parent."""


class Node:
    """The daemon, polled and killed by the drill. `faults` are ends that no kill caused."""

    def __init__(self, daemon: Daemon, clock: Clock, orphans: Orphans, seed: int) -> None:
        self.daemon = daemon
        self._clock, self._orphans = clock, orphans
        self._draw = random.Random(seed)
        self._started_at: float | None = None
        """Start of a daemon that does not answer yet."""
        self._poll_at = 0.0
        self.away_until = 0.0
        self.faults: list[str] = []

    def start(self) -> None:
        """Start the daemon without waiting; `poll` notices when it serves."""
        self._started_at = time.monotonic()
        self.daemon.launch()

    @property
    def serving(self) -> bool:
        """True once the running daemon has answered."""
        return self._started_at is None

    def was_away_since(self, moment: float) -> bool:
        """True when no daemon served at some time since `moment`."""
        return self._started_at is not None or self.away_until >= moment

    def poll(self) -> None:
        """Restart a daemon that has ended; ask a starting one whether it serves."""
        assert self.daemon.process is not None
        if self.daemon.process.poll() is not None:
            tail = self.daemon.log.splitlines()[-1:]
            self.faults.append(
                f"the daemon ended by itself with code {self.daemon.process.returncode}: {tail}"
            )
            self.start()
        now = time.monotonic()
        if self._started_at is not None and now >= self._poll_at:
            self._poll_at = now + POLL_INTERVAL_S
            if self.daemon.ready():
                self._clock.served("daemon", time.monotonic() - self._started_at)
                self._started_at, self.away_until = None, time.monotonic()

    def kill(self) -> None:
        """Kill the daemon, alone or with the parent that starts it again; fillers and builder must end by themselves."""
        self._clock.killed("daemon", self.serving)
        self._orphans.add(self._children())
        daemons = self.daemon.children()
        if daemons and self._draw.random() < ALONE:
            self._started_at = time.monotonic()
            for pid in daemons:
                with suppress(psutil.NoSuchProcess):
                    psutil.Process(pid).kill()
        else:
            self.daemon.kill()
            self.start()

    def kill_filler(self) -> bool:
        """Kill a filler or the builder; return False when there is none now."""
        daemons = self.daemon.children()
        victims = [each for each in self._children() if each.pid not in daemons]
        if not victims:
            return False
        try:
            self._draw.choice(victims).kill()
        except psutil.NoSuchProcess:  # it ended by itself meanwhile
            return False
        self._clock.killed("filler, builder", True)
        return True

    def _children(self) -> list[psutil.Process]:
        assert self.daemon.process is not None
        return psutil.Process(self.daemon.process.pid).children(recursive=True)
