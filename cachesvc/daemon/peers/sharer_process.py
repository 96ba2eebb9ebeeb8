"""The process that gives peers what this node holds, seen from the daemon: it is lent a read-only descriptor for each
read. It faces the network, so it has no credentials; and bytes that go through the daemon's own interpreter make its
slowest grants two to four times slower (design D4)."""

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
NEEDED = frozenset(
    {"PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "HOME", "LANG", "TZ", "CACHESVC_LOG"}
)
MOST_ASKED = 64
"""Descriptors that it may wait for; a sound one waits for as many as it serves. Their answers fit its socket's buffer."""
END_S = 2.0
AGAIN_S = 1.0
"""Before a process that died is replaced."""


class SharerProcess:
    """Lends what anybody may read: peers are nobody's users."""

    def __init__(self, settings: Settings, runner: Runner) -> None:
        self._given = json.dumps(
            {
                "share": settings.share,
                "tls": settings.tls and asdict(settings.tls),
                "log": settings.log_format,
            }
        )
        self._runner = runner
        self._over = threading.Event()
        self._asked = threading.Semaphore(MOST_ASKED)
        self._channel: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="sharing", daemon=True)
        self.sent_bytes = 0

    def start(self) -> None:
        """Start the process; it listens as soon as its address is free."""
        self._thread.start()

    def close(self) -> None:
        """End the process, and start no other."""
        self._over.set()
        if (channel := self._channel) is not None:
            with suppress(OSError):
                channel.shutdown(socket.SHUT_RDWR)
        if self._thread.is_alive():
            self._thread.join(2 * END_S)

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                process, self._channel = spawn("cachesvc.daemon.peers.sharer", self._given, _plain())
            except OSError as error:
                log.warning("nothing is shared with peers", extra={"error": error.strerror})
            else:
                with self._channel:
                    self._serve(self._channel)
                process.kill()
                code: int | None = None
                with suppress(subprocess.TimeoutExpired):  # a disk hangs, and the process with it
                    code = process.wait(END_S)
                if not self._over.is_set():
                    log.warning("the process that serves peers ended by itself", extra={"code": code})
            self._over.wait(AGAIN_S)

    def _serve(self, channel: socket.socket) -> None:
        """Until the process ends, or says what it should not."""
        while not self._over.is_set():
            try:
                received = jobs.receive(channel)
            except TimeoutError:
                continue
            except jobs.RECEIVE_ERRORS:
                return
            message = received[0] if received else None
            for fd in received[1] if received else ():  # none is expected, and none may pile up
                os.close(fd)
            if message is None or not jobs.is_well_typed(message):
                return
            if isinstance(message, jobs.BorrowExtent) and _ID.fullmatch(message.extent):
                if not self._asked.acquire(blocking=False):
                    return
                self._runner.loop.post(partial(self._lend, channel, message))
            elif isinstance(message, jobs.BytesSent):
                self.sent_bytes += message.size_bytes
            else:
                return

    def _lend(self, channel: socket.socket, asked: jobs.BorrowExtent) -> None:
        """Answer with a resident extent of an open dataset: what a wider allowlist once brought here is nobody's. On
        the loop's thread."""
        node, checks, datasets = self._runner.node, self._runner.checks, self._runner.datasets
        extent = ExtentId(bytes.fromhex(asked.extent))
        home = datasets.dataset_with(extent)
        shared = home is not None and not home[0].rules
        tier = node.where(extent) if shared else None
        if tier is not None and self._runner.hole_records.of(extent, tier).ranges:
            tier = None  # the peer may be able to read what is missing here

        def found(fd: int, checksums: Checksums | None) -> None:
            if checksums is None:  # being committed
                absent()
            else:
                digests = jobs.pack_digests(checksums.digests)
                self._answer(channel, jobs.LentExtent(asked.number, checksums.size_bytes, digests), fd)
            os.close(fd)

        def absent() -> None:
            self._answer(channel, jobs.LentExtent(asked.number))

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
        self._asked.release()
        with suppress(OSError):  # it ended; another will be asked
            jobs.send(channel, answer, descriptors)


def _plain() -> dict[str, str]:
    """What Python needs of our environment: what faces the network has no use for credentials."""
    return {name: value for name, value in os.environ.items() if name in NEEDED}
