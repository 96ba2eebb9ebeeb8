"""The processes that the parent starts: daemons, and the S3 endpoint, which lives while daemons come and go."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from cachesvc.config import Settings
from cachesvc.core.errors import CacheError
from cachesvc.daemon.parent.messages import CopyHeld, Given, Program, Release
from cachesvc.daemon.processes.spawn import spawn

log = logging.getLogger(__name__)
RESTART_S = 1.0
"""The pause before a process that died is replaced."""


class S3Process:
    """Runs in the parent's thread."""

    def __init__(self) -> None:
        self._release: Release | None = None
        self._pid = 0
        self._channel: socket.socket | None = None
        self.start_at = math.inf
        """The time at which `tick` is due, in seconds of the monotonic clock."""

    def serve(self, release: Release) -> None:
        """Begin to serve by this release, if it has an S3 endpoint. Does nothing where this one runs."""
        if release is self._release:
            return
        self._release = release
        if self._pid:
            self.end()  # its end starts the next one
        else:
            self.start_at = time.monotonic()

    def tick(self, now: float) -> None:
        """Start the process, where that is due."""
        if self.start_at > now or self._release is None:
            return
        self.start_at = math.inf
        program, settings = self._release.program, self._release.settings
        if not msgspec.json.decode(settings, type=Settings).s3:
            return
        try:
            self._pid, self._channel = _spawned("cachesvc.gateway.s3", msgspec.Raw(settings), program)
        except OSError as error:
            log.error("the S3 endpoint cannot be started", extra={"error": error.strerror})
            self.start_at = now + RESTART_S

    def reaped(self, pid: int, code: int, stopping: bool) -> None:
        """Note that a process ended, perhaps another one."""
        if pid != self._pid:
            return
        self._pid = 0
        self.end()
        if not stopping:
            if code:
                log.error("the S3 endpoint ended and is started again", extra={"code": code})
            self.start_at = time.monotonic() + RESTART_S * bool(code)

    def end(self) -> None:
        """Have the process end: it watches its channel."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None


Launch = Callable[[Program, Given, int], tuple[int, socket.socket]]
"""Starts a daemon, which inherits a lock; returns its pid and the parent's end of the channel to it. Raises OSError."""


def launch_daemon(program: Program, given: Given, lock: int) -> tuple[int, socket.socket]:
    """Start the daemon of a release as a process of its own interpreter."""
    return _spawned("cachesvc.daemon.serve", given, program, (lock,))


def _spawned(
    module: str, given: object, program: Program, inherits: tuple[int, ...] = ()
) -> tuple[int, socket.socket]:
    """Start a module of a release; return its pid and the parent's end of its channel. Raises OSError."""
    process, channel = spawn(
        module, given, program.environment, inherits, program.executable, program.directory
    )
    process.returncode = 0  # the parent reaps all processes; Popen is not to
    return process.pid, channel


@dataclass(slots=True, eq=False)
class DaemonProcess:
    """A daemon's process."""

    pid: int
    channel: socket.socket
    asks: bool = False
    """It waits for copies."""
    batches: Iterator[list[tuple[CopyHeld, int]]] | None = None
    """The copies that it was not given yet; None before the first."""
    served_at: float = math.inf
    failure: CacheError | None = None
    leaves: bool = False
    """It was told to leave."""
    hung_at: float = math.inf
    """The time at which it is given up, since it closed its channel, or was told to leave."""

    def signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
