"""What the core grants is opened and sent. Memory is at hand; a file is opened, and checked where need be, on its disk's
own thread."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping

from cachesvc.core import commands, events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import RAM, TierName
from cachesvc.daemon.access.tenants import NOBODY
from cachesvc.daemon.fills.checks import Checks, Good, short_of_descriptors
from cachesvc.daemon.fills.missing_objects import Lacking
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.tiers.tier import Checksums, Tier

log = logging.getLogger(__name__)


class Granting:
    """Carries out `Grant`, `Recall`, `Refuse` and `Fail`. Runs on the loop's thread."""

    def __init__(
        self,
        tiers: Mapping[TierName, Tier],
        checks: Checks,
        lacking: Lacking,
        handle: Callable[[events.Event], None],
        next_id: Callable[[], int],
    ) -> None:
        self.server: GrantsServer | None = None
        self._tiers = tiers
        self._checks = checks
        self._lacking = lacking
        self._handle = handle
        self._next_id = next_id
        self._opening: dict[int, commands.Grant] = {}

    def unsent(self) -> list[commands.Grant]:
        """Grants whose files are being opened."""
        return list(self._opening.values())

    def grant(self, command: commands.Grant) -> None:
        """Send a descriptor of the copy, or have the reader read elsewhere what cannot be opened."""
        if command.tier != RAM:
            self._grant_file(command)
            return
        try:  # at once, and without a look at its bytes: nobody can have changed what is sealed
            fd, _ = self._tiers[RAM].open(command.extent)
        except CacheError as error:
            self._not_opened(command, error)
        else:
            self._send(command, fd)

    def recall(self, command: commands.Recall) -> None:
        """Ask for what was granted."""
        assert self.server is not None
        self.server.recall(command.reader, command.extent, command.wrong)

    def refuse(self, command: commands.Refuse) -> None:
        """Have the reader read it elsewhere."""
        assert self.server is not None
        self.server.refuse(command.reader, command.request, command.extent)

    def fail(self, command: commands.Fail) -> None:
        """Say why it cannot be had."""
        assert self.server is not None
        self.server.fail(command.reader, command.request, command.extent, command.code, command.message)

    def tier_lost(self, name: TierName) -> None:
        """Answer whoever waits for a file of a tier that does not answer."""
        for number in [number for number, grant in self._opening.items() if grant.tier == name]:
            self._elsewhere(self._opening.pop(number))

    def _grant_file(self, command: commands.Grant) -> None:
        number = self._next_id()
        self._opening[number] = command
        if command.extent not in self._checks.unverified[command.tier]:
            self._open(number)
            return

        def checked(good: Good) -> None:
            if good:
                self._open(number)
            elif not self._opening.pop(number, None):
                return  # refused meanwhile: its tier was lost
            elif good is None:  # to ask again at once would keep the loop from all else
                self._elsewhere(command)
            else:
                self._handle(events.NotGranted(command, again=True))

        # After a restart or its trouble the disk may have changed what it holds: check before the first grant.
        user = self.server.user_of(command.reader) if self.server else NOBODY
        self._checks.verify(command.extent, command.tier, checked, user)

    def _open(self, number: int) -> None:
        command = self._opening.get(number)
        if command is None:
            return  # refused meanwhile: its tier was lost

        def opened(fd: int, _: Checksums | None) -> None:
            if self._opening.pop(number, None):
                self._send(command, fd)
            else:
                os.close(fd)

        def failed(error: CacheError) -> None:
            if self._opening.pop(number, None):
                self._not_opened(command, error)

        self._checks.open(command.extent, command.tier, opened, failed)

    def _send(self, command: commands.Grant, fd: int) -> None:
        """Give the reader the descriptor, which ends here."""
        assert self.server is not None
        sent = self.server.grant(command, fd, self._lacking.of(command.extent, command.tier).holes)
        os.close(fd)
        if not sent:
            self._elsewhere(command)

    def _not_opened(self, command: commands.Grant, error: CacheError) -> None:
        log.error("a resident extent cannot be opened", extra={"error": str(error), "tier": command.tier})
        if not short_of_descriptors(error):
            self._checks.failed(command.extent, command.tier, error.code)
        self._elsewhere(command)

    def _elsewhere(self, command: commands.Grant) -> None:
        self._handle(events.NotGranted(command))
