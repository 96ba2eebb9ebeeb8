"""A daemon's process, as its parent sees it."""

from __future__ import annotations

import math
import socket
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from cachesvc.core.errors import CacheError
from cachesvc.daemon.parent.messages import CopyHeld, Given, Program
from cachesvc.daemon.processes.spawn import spawn

Launch = Callable[[Program, Given, int], tuple[int, socket.socket]]
"""Starts a daemon, which inherits a lock; returns its pid and the parent's end of the channel to it. Raises OSError."""


def launch_daemon(program: Program, given: Given, lock: int) -> tuple[int, socket.socket]:
    """Start the daemon of a release as a process of its own interpreter."""
    process, channel = spawn(
        "cachesvc.daemon.serve",
        given,
        program.environment,
        (lock,),
        executable=program.executable,
        directory=program.directory,
    )
    process.returncode = 0  # the parent reaps all processes; Popen is not to
    return process.pid, channel


@dataclass(slots=True, eq=False)
class DaemonProcess:
    """A daemon's process."""

    pid: int
    channel: socket.socket
    began_at: float
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
