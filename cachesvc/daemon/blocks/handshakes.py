"""Connections that have not finished TLS: a small pool, from which a crowd drives out itself and no other.

Any host that reaches the port can open connections. In a full pool a new connection replaces the oldest one of the host
that has the most. A member's handshake takes a few round trips, and a host that opens hundreds of connections replaces only
its own.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
HANDSHAKES = 32
"""Handshakes at a time. Each has a thread."""
HANDSHAKE_S = 5.0
"""The time that a handshake has."""
_Member = TypeVar("_Member")


class Handshakes(Generic[_Member]):
    """The pool. Thread-safe. `end` ends a connection, which then calls `finished`."""

    def __init__(self, end: Callable[[_Member], None], limit: int = HANDSHAKES) -> None:
        self._end, self._limit = end, limit
        self._lock = threading.Lock()
        self._waiting: dict[_Member, str] = {}
        """The host of each connection, the oldest connection first."""
        self.refused = 0
        """Connections that were ended or refused before they proved to be a member's."""

    def began(self, connection: _Member, host: str) -> None:
        """Take a connection; where the pool is full, end the oldest one of the host that has the most."""
        crowding: _Member | None = None
        with self._lock:
            self._waiting[connection] = host
            if len(self._waiting) > self._limit:
                ((crowd, _),) = Counter(self._waiting.values()).most_common(1)
                crowding = next(each for each, its in self._waiting.items() if its == crowd)
                del self._waiting[crowding]
        if crowding is not None:
            self.failed(crowd, "it opens connections and does not finish their TLS handshakes")
            self._end(crowding)

    def finished(self, connection: _Member) -> bool:
        """Return whether the connection was still in the pool, and remove it."""
        with self._lock:
            return self._waiting.pop(connection, None) is not None

    def failed(self, host: str, why: str) -> None:
        """Count and log a connection that is refused."""
        with self._lock:
            self.refused += 1
        log.warning("a connection to the port of extents is refused", extra={"host": host, "why": why})
