"""Lends this node's extents to its peer agent, for other nodes to read."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable
from contextlib import suppress

from cachesvc.core.errors import CacheError
from cachesvc.core.model import ExtentId, TierName, is_prepared
from cachesvc.core.node.node import Node
from cachesvc.daemon.fills.checks import CheckResult, Checks, is_own_limit
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.fills.shared_fills import SharedFill, SharedFills
from cachesvc.daemon.peers import messages
from cachesvc.daemon.processes.datagrams import send
from cachesvc.tiers.tier import Checksums

log = logging.getLogger(__name__)
MAX_PENDING = 512
"""Requests of the agent that may be pending; further ones are answered at once, as if the extent were absent."""


class Lending:
    """Runs on the loop's thread. Answers each request once, on the channel that it came from."""

    def __init__(
        self,
        node: Node,
        checks: Checks,
        shared_fills: SharedFills,
        hole_records: HoleRecords,
        maker_of: Callable[[ExtentId], int],
        share_prepared: bool = False,
    ) -> None:
        """`maker_of` returns the maker of an extent here, 0 for this node. `share_prepared`: other nodes may read complete
        copies of prepared extents too."""
        self._share_prepared = share_prepared
        self._maker_of = maker_of
        self._node, self._checks = node, checks
        self._shared_fills, self._hole_records = shared_fills, hole_records
        self._pending = 0

    def lends(self, extent: ExtentId) -> bool:
        """Return whether other nodes may know what this node has of an extent."""
        return self._share_prepared or not is_prepared(extent)

    def complete_in(self, extent: ExtentId) -> TierName | None:
        """The tier with a copy for other nodes; None where there is none, or one with holes: another node may be able to
        read the missing objects."""
        tier = self._node.where(extent)
        return None if tier is None or self._hole_records.of(extent, tier).ranges else tier

    def lend(self, channel: socket.socket, request: messages.BorrowExtent) -> None:
        """Answer with an extent that is resident, is being filled, or will be soon.

        Its dataset may be one that no job here has opened since this daemon began. Which sources and users are allowed is
        for the asking node to enforce: members trust each other.
        """
        if self._pending >= MAX_PENDING or not self.lends(request.extent):
            _send(channel, messages.LentExtent(request.number))
            return
        self._pending += 1
        node, checks = self._node, self._checks
        extent = request.extent
        tier = self.complete_in(extent)

        def found(fd: int, checksums: Checksums | None) -> None:
            if checksums is None:  # its commit is pending
                absent()
            else:
                lent = messages.LentExtent(
                    request.number, checksums.size_bytes, checksums.digests, self._maker_of(extent)
                )
                self._reply(channel, lent, fd)
            os.close(fd)

        def absent() -> None:
            self._reply(channel, messages.LentExtent(request.number))

        def failed(error: CacheError) -> None:
            if tier is not None and not is_own_limit(error):
                checks.failed(extent, tier, error.code)
            absent()

        def checked(good: CheckResult) -> None:
            if tier is not None and good and node.where(extent) == tier:
                checks.open(extent, tier, found, failed)
            else:
                absent()

        def begun(fill: SharedFill | None) -> None:
            if fill is None:
                absent()
            else:
                lent = messages.LentExtent(request.number, fill.progress.size_bytes)
                self._reply(channel, lent, fill.readable, fill.progress_fd)

        if tier is None:
            if not is_prepared(extent) and node.will_keep(extent) and node.where(extent) is None:
                self._shared_fills.when_begun(extent, begun)
            else:
                absent()
        elif node.policy.tiers[tier].stalled:  # the peer gives up before the disk answers
            absent()
        elif (checksums := checks.committing.get((extent, tier))) is not None:
            checks.open(extent, tier, lambda fd, _: found(fd, checksums), failed)
        elif extent in checks.unverified[tier]:
            checks.verify(extent, tier, checked)
        else:
            checked(True)

    def check(self, extent: ExtentId) -> None:
        """Check a copy whose bytes were wrong at a peer."""
        tier = self._node.where(extent)
        if tier is not None:
            self._checks.verify(extent, tier, lambda _: None)

    def _reply(self, channel: socket.socket, answer: messages.LentExtent, *descriptors: int) -> None:
        self._pending -= 1
        _send(channel, answer, *descriptors)


def _send(channel: socket.socket, answer: messages.LentExtent, *descriptors: int) -> None:
    try:
        send(channel, answer, descriptors)
    except TimeoutError:
        end_agent(channel)
    except OSError:  # the process has ended; the peer fails over
        pass


def end_agent(channel: socket.socket) -> None:
    """Have an agent that stands still replaced."""
    log.warning("the peer agent does not answer and is replaced")
    with suppress(OSError):
        channel.shutdown(socket.SHUT_RDWR)
