"""Opens what the core grants and sends it to readers. Memory is opened at once; a file is opened, and verified where
needed, on its disk's thread."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from cachesvc.core import commands, events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import RAM, TierName
from cachesvc.core.wire import NO_DATASET
from cachesvc.daemon.fills.checks import CheckResult, Checks, is_own_limit
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.tiers.tier import Checksums, Tier

log = logging.getLogger(__name__)


@dataclass(eq=False)
class Granting:
    """Executes the command `Grant`. Runs on the loop's thread."""

    _server: GrantsServer
    _tiers: Mapping[TierName, Tier]
    _checks: Checks
    _hole_records: HoleRecords
    _handle: Callable[[events.Event], None]
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    _opening: dict[int, commands.Grant] = field(default_factory=dict)

    def grant(self, command: commands.Grant) -> None:
        """Send a descriptor of the copy. Where it cannot be opened, the reader reads elsewhere."""
        if command.tier != RAM:
            self._grant_file(command)
            return
        try:  # without verification: sealed memory cannot change
            fd, checksums = self._tiers[RAM].open(command.extent)
        except CacheError as error:
            self._not_opened(command, error)
        else:
            self._send(command, fd, checksums)

    def tier_lost(self, name: TierName) -> None:
        """Answer the readers that wait for files of a lost tier: they read elsewhere."""
        for number in [number for number, grant in self._opening.items() if grant.tier == name]:
            self._not_granted(self._opening.pop(number))

    def _grant_file(self, command: commands.Grant) -> None:
        number = next(self._numbers)
        self._opening[number] = command
        if command.extent not in self._checks.unverified[command.tier]:
            self._open(number)
            return

        def checked(good: CheckResult) -> None:
            if good:
                self._open(number)
            elif not self._opening.pop(number, None):
                return  # refused meanwhile: its tier was lost
            elif good is None:  # not verified now; a retry at once would occupy the loop
                self._not_granted(command)
            else:
                self._handle(events.NotGranted(command, again=True))

        # The disk may have changed its files before a restart or during a failure: verify before the first grant.
        user = self._server.user_of(command.reader)
        self._checks.verify(command.extent, command.tier, checked, user)

    def _open(self, number: int) -> None:
        command = self._opening.get(number)
        if command is None:
            return  # refused meanwhile: its tier was lost

        def opened(fd: int, checksums: Checksums | None) -> None:
            if self._opening.pop(number, None):
                checksums = checksums or self._checks.committing.get((command.extent, command.tier))
                self._send(command, fd, checksums)
            else:
                os.close(fd)

        def failed(error: CacheError) -> None:
            if self._opening.pop(number, None):
                self._not_opened(command, error)

        self._checks.open(command.extent, command.tier, opened, failed)

    def _send(self, command: commands.Grant, fd: int, checksums: Checksums | None) -> None:
        """Send the descriptor to the reader and close it. `checksums`: None where a commit ended meanwhile."""
        content = checksums.content if checksums is not None else NO_DATASET
        holes = self._hole_records.of(command.extent, command.tier).ranges
        size_bytes = checksums.size_bytes if checksums is not None else command.size_bytes
        sent = self._server.grant(command, fd, holes, content, size_bytes)
        os.close(fd)
        if not sent:
            self._not_granted(command)

    def _not_opened(self, command: commands.Grant, error: CacheError) -> None:
        log.error("a resident extent cannot be opened", extra={"error": str(error), "tier": command.tier})
        if not is_own_limit(error):
            self._checks.failed(command.extent, command.tier, error.code)
        self._not_granted(command)

    def _not_granted(self, command: commands.Grant) -> None:
        self._handle(events.NotGranted(command))
