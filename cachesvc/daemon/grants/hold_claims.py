"""Bounds how much memory readers may claim to hold from before the daemon's start."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable

from cachesvc.core import events
from cachesvc.core.model import RAM, ExtentId, ReaderId
from cachesvc.core.node.node import Node

log = logging.getLogger(__name__)


class HoldClaims:
    """Accepts claims up to a limit for each user: its quota, or half of the RAM budget without one. The daemon's own user
    may claim all of the budget. Without a limit a user could take the RAM tier by claims alone."""

    def __init__(self, node: Node, handle: Callable[[events.Event], None]) -> None:
        self._node = node
        self._handle = handle
        self._reported: set[int] = set()
        """Users whose excess claims were logged."""

    def claim(
        self, reader: ReaderId, user: int, quota_bytes: int | None, extent: ExtentId, size_bytes: int
    ) -> None:
        """Handle HOLD: a reader claims `size_bytes` of memory for an extent; 0 for a file."""
        ram = self._node.policy.tiers.get(RAM)
        limit_bytes = ram.budget_bytes if ram else 0
        if user != os.geteuid():
            limit_bytes = limit_bytes // 2 if quota_bytes is None else quota_bytes
        self._handle(events.HoldReported(reader, extent, size_bytes, user, limit_bytes))
        if self._node.readers.held_bytes(reader, extent) < size_bytes and user not in self._reported:
            self._reported.add(user)
            log.warning(
                "memory that a reader claims to hold from before the start is not counted",
                extra={"peer_uid": user, "most_bytes": limit_bytes},
            )
