"""Grants of prepared extents. What the daemon cannot grant is read nowhere else: its reader prepares it for itself."""

from __future__ import annotations

import os
from collections.abc import Sequence

from cachesvc.client.protocol import Granted, Grants, Refused
from cachesvc.core.errors import DaemonUnavailable, DeadlineExceeded


class NotPrepared(Exception):
    """Prepared extents cannot be had now: no process prepares them, there is no room, or the daemon is gone."""

    def __init__(self, extents: frozenset[int]) -> None:
        super().__init__(f"{len(extents)} prepared extents cannot be had now")
        self.extents = extents


class PreparedGrants:
    """The grants of a daemon for a prepared dataset. Safe to share between threads."""

    def __init__(self, daemon: Grants) -> None:
        self._daemon = daemon
        self.release, self.passed, self.close = daemon.release, daemon.passed, daemon.close

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`. Raises NotPrepared, and then no extent of this call stays leased."""
        try:
            answers = self._daemon.acquire(extents, timeout_s)
        except (DaemonUnavailable, DeadlineExceeded):
            raise NotPrepared(frozenset(extents)) from None
        refused = frozenset(answer.extent for answer in answers if isinstance(answer, Refused))
        if not refused:
            return answers
        granted = [answer for answer in answers if isinstance(answer, Granted)]
        for each in granted:
            os.close(each.fd)
        self._daemon.release([each.extent for each in granted])
        raise NotPrepared(refused)
