"""The daemon's side of the sharer process, which gets a read-only descriptor for each read of a peer.

The sharer faces the network, so it has no credentials. Sending the bytes from the daemon's own interpreter would make its
slowest grants two to four times slower.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import subprocess
import threading
from contextlib import suppress
from dataclasses import asdict
from functools import partial

from cachesvc.config import Settings
from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId
from cachesvc.daemon.fills.checks import CheckResult, is_own_limit
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.spawn import spawn
from cachesvc.daemon.runner import Runner
from cachesvc.tiers.tier import Checksums

log = logging.getLogger(__name__)
_ID = re.compile("[0-9a-f]{32}")
KEPT_VARIABLES = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "TZ", "CACHESVC_LOG"}
)
MAX_PENDING = 64
"""Requests of the sharer that may be pending; a correct one has at most one for each call. Their answers fit the socket's
buffer."""
END_S = 2.0
RESTART_S = 1.0
"""The pause before a process that died is replaced."""


class SharerProcess:
    """Lends only extents that every user may read, since a peer acts for no user."""

    def __init__(self, settings: Settings, runner: Runner) -> None:
        self._given = json.dumps(
            {
                "share": settings.share,
                "tls": settings.tls and asdict(settings.tls),
                "log": settings.log_format,
            }
        )
        self._runner = runner
        self._closed = threading.Event()
        self._pending = threading.Semaphore(MAX_PENDING)
        self._channel: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="sharing", daemon=True)
        self.sent_bytes = 0

    def start(self) -> None:
        """Start the process, which listens as soon as its address is free."""
        self._thread.start()

    def close(self) -> None:
        """End the process for good."""
        self._closed.set()
        if (channel := self._channel) is not None:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(2 * END_S)

    def _run(self) -> None:
        while not self._closed.is_set():
            try:
                process, self._channel = spawn("cachesvc.daemon.peers.sharer", self._given, _environment())
            except OSError as error:
                log.warning(
                    "the process that serves peers cannot be started", extra={"error": error.strerror}
                )
            else:
                with self._channel:
                    self._serve(self._channel)
                process.kill()
                code: int | None = None
                with suppress(subprocess.TimeoutExpired):  # the process hangs in a disk
                    code = process.wait(END_S)
                if not self._closed.is_set():
                    log.warning("the process that serves peers ended unexpectedly", extra={"code": code})
            self._closed.wait(RESTART_S)

    def _serve(self, channel: socket.socket) -> None:
        """Answer the process until it ends or sends an invalid message."""
        while not self._closed.is_set():
            try:
                received = jobs.receive(channel)
            except TimeoutError:
                continue
            except jobs.RECEIVE_ERRORS:
                return
            message = received[0] if received else None
            for fd in received[1] if received else ():  # none is expected
                os.close(fd)
            if message is None or not jobs.is_well_typed(message):
                return
            if isinstance(message, jobs.BorrowExtent) and _ID.fullmatch(message.extent):
                if not self._pending.acquire(blocking=False):
                    return
                self._runner.loop.post(partial(self._lend, channel, message))
            elif isinstance(message, jobs.BytesSent):
                self.sent_bytes += message.size_bytes
            else:
                return

    def _lend(self, channel: socket.socket, request: jobs.BorrowExtent) -> None:
        """Answer on the loop's thread, with a resident extent of a loaded dataset that has no rules.

        Other resident extents may have been cached under a wider allowlist.
        """
        node, checks, datasets = self._runner.node, self._runner.checks, self._runner.datasets
        extent = ExtentId(bytes.fromhex(request.extent))
        home = datasets.dataset_with(extent)
        shared = home is not None and not home[0].rules
        tier = node.where(extent) if shared else None
        if tier is not None and self._runner.hole_records.of(extent, tier).ranges:
            tier = None  # the peer may be able to read the missing objects

        def found(fd: int, checksums: Checksums | None) -> None:
            if checksums is None:  # its commit is pending
                absent()
            else:
                digests = jobs.pack_digests(checksums.digests)
                self._answer(channel, jobs.LentExtent(request.number, checksums.size_bytes, digests), fd)
            os.close(fd)

        def absent() -> None:
            self._answer(channel, jobs.LentExtent(request.number))

        def failed(error: CacheError) -> None:
            if tier is not None and not is_own_limit(error):
                checks.failed(extent, tier, error.code)
            absent()

        def checked(good: CheckResult) -> None:
            if tier is not None and good and node.where(extent) == tier:
                checks.open(extent, tier, found, failed)
            else:
                absent()

        if tier is not None and extent in checks.unverified[tier]:
            checks.verify(extent, tier, checked)
        else:
            checked(True)

    def _answer(self, channel: socket.socket, answer: jobs.LentExtent, *descriptors: int) -> None:
        self._pending.release()
        with suppress(OSError):  # the process has ended; the peer fails over
            jobs.send(channel, answer, descriptors)


def _environment() -> dict[str, str]:
    """The variables that Python needs, and none with credentials, since the process faces the network."""
    return {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
