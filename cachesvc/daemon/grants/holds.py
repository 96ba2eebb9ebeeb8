"""What readers say they hold from before the start: how much of it is believed, by whose word it is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from cachesvc.core import events
from cachesvc.core.model import RAM, ExtentId, ReaderId
from cachesvc.core.node.node import Node

log = logging.getLogger(__name__)


class Holds:
    """Believes the daemon's own user; of any other no more than its quota, or half of the RAM budget where it has none,
    as with connections: saying so costs no lease."""

    def __init__(self, node: Node, handle: Callable[[events.Event], None]) -> None:
        self._node = node
        self._handle = handle
        self._doubted: set[int] = set()
        """Users of whom the log says that they claim more."""

    def said(
        self, reader: ReaderId, user: int, quota_bytes: int | None, extent: ExtentId, size_bytes: int
    ) -> None:
        """HOLD, of so many bytes of memory; a file is none."""
        ram = self._node.policy.tiers.get(RAM)
        most_bytes = ram.budget_bytes if ram else 0
        if user != os.geteuid():
            most_bytes = most_bytes // 2 if quota_bytes is None else quota_bytes
        self._handle(events.HoldReported(reader, extent, size_bytes, user, most_bytes))
        if self._node.readers.held_bytes(reader, extent) < size_bytes and user not in self._doubted:
            self._doubted.add(user)
            log.warning(
                "what a reader says it holds from before the start is not counted",
                extra={"peer_uid": user, "most_bytes": most_bytes},
            )
