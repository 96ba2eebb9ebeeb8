"""The daemon's side of its channel to the parent, and the adoption of the copies that an earlier daemon filled."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import socket
from collections.abc import Iterable, Iterator

from cachesvc.core import events
from cachesvc.core.errors import CacheError, DaemonUnavailable
from cachesvc.core.model import ExtentId
from cachesvc.daemon.events.event import Event, record
from cachesvc.daemon.parent.messages import (
    CopiesHeld,
    CopyHeld,
    DaemonServes,
    DropCopy,
    GiveCopies,
    HoldCopy,
    StartFailed,
    ToDaemon,
    receive_from_parent,
)
from cachesvc.daemon.processes.datagrams import RECEIVE_ERRORS, send
from cachesvc.tiers.ram import RamTier
from cachesvc.tiers.tier import Checksums

log = logging.getLogger(__name__)
ANSWER_S = 5.0
"""A parent that does not answer for so long is killed, and this process with it: whatever starts the service starts it
again. It only receives, closes a descriptor and answers."""
_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent ends. Ends it at once where that has happened."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


class ParentLink:
    """Used by one thread at a time: first by the one that starts the daemon, then by the RAM tier's."""

    def __init__(self, channel: socket.socket) -> None:
        self._channel = channel

    def copies(self) -> Iterator[tuple[CopyHeld, int]]:
        """Wait until no other daemon runs, and yield the copies that the parent holds, with descriptors for the caller;
        those filled last come first."""
        self._channel.settimeout(None)
        while True:
            send(self._channel, GiveCopies())
            answer, descriptors = self._receive()
            assert isinstance(answer, CopiesHeld)
            if not answer.copies:
                break
            yield from zip(answer.copies, descriptors, strict=False)
        self._channel.settimeout(ANSWER_S)

    def serves(self) -> None:
        """Tell the parent that the daemon serves."""
        send(self._channel, DaemonServes())

    def failed(self, error: CacheError) -> None:
        """Tell the parent why the daemon did not start."""
        send(self._channel, StartFailed(error.code, str(error)))

    def hold(self, extent: ExtentId, fd: int, checksums: Checksums) -> None:
        """Have the parent hold a sealed copy. The descriptor stays the caller's."""
        try:
            send(self._channel, HoldCopy(CopyHeld(extent, checksums.size_bytes, checksums.digests)), (fd,))
        except OSError as error:
            self._replace(error)

    def drop(self, extent: ExtentId) -> None:
        """Have the parent give up a copy. Its memory is free when this returns, but for readers."""
        try:
            send(self._channel, DropCopy(extent))
            self._receive()
        except (OSError, DaemonUnavailable) as error:
            self._replace(error)

    def _receive(self) -> tuple[ToDaemon, list[int]]:
        try:
            received = receive_from_parent(self._channel)
        except RECEIVE_ERRORS as error:
            raise DaemonUnavailable(f"the parent does not answer ({error})") from error
        if received is None:
            raise DaemonUnavailable("the parent has ended")
        return received

    def _replace(self, error: Exception) -> None:
        log.error("the parent process does not answer and is killed", extra={"error": str(error)})
        os.kill(os.getppid(), signal.SIGKILL)  # this process dies with it
        signal.pause()


def adopt_copies(tier: RamTier, budget_bytes: int, held: Iterable[tuple[CopyHeld, int]]) -> events.Recovered:
    """Adopt the copies that fit into the budget, and give up the others. Those that were filled last come first."""
    fitting: dict[ExtentId, int] = {}
    for copy, fd in held:
        try:
            if copy.size_bytes <= budget_bytes:
                tier.adopt(copy.extent, fd, Checksums(copy.size_bytes, copy.digests))
                budget_bytes -= copy.size_bytes
                fitting[copy.extent] = copy.size_bytes
                continue
        except CacheError as error:
            log.warning("a copy is not adopted", extra={"extent": copy.extent.hex(), "error": str(error)})
        os.close(fd)
        tier.give_up(copy.extent)
    if fitting:
        record(Event("adopted", tier=tier.name, extents=len(fitting), size_bytes=sum(fitting.values())))
    return events.Recovered(tier.name, dict(reversed(fitting.items())))  # the core expects the oldest first
