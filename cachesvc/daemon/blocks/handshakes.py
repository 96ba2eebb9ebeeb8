"""Connections that have not finished TLS: a small pool, from which a crowd drives out itself and no other.

Any host that reaches the port can open connections. In a full pool a new connection replaces the oldest one of the host
that has the most. A member's handshake takes a few round trips, and a host that opens hundreds of connections replaces only
its own.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

log = logging.getLogger(__name__)
HANDSHAKES = 32
"""Handshakes at a time. Each has a thread."""
HANDSHAKE_S = 5.0
"""The time that a handshake has."""
LOG_S = 60.0
"""The least time between two log lines about one host."""
LOGGED_HOSTS = 256
"""Hosts whose last log line is remembered."""
_Member = TypeVar("_Member")


@dataclass(slots=True)
class _Logged:
    """The last log line about a host, and the connections that it did not count."""

    at: float
    unsaid: int = 0


class Handshakes(Generic[_Member]):
    """The pool. Thread-safe. `end` ends a connection, which then calls `finished`."""

    def __init__(
        self,
        end: Callable[[_Member], None],
        limit: int = HANDSHAKES,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._end, self._limit, self._now = end, limit, now
        self._lock = threading.Lock()
        self._waiting: dict[_Member, str] = {}
        """The host of each connection, the oldest connection first."""
        self._logged: dict[tuple[str, str], _Logged] = {}
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
        """Count a connection that is refused, and log it unless another one of that host was a minute ago."""
        with self._lock:
            self.refused += 1
            now, last = self._now(), self._logged.get((host, why))
            if last is not None and now - last.at < LOG_S:
                last.unsaid += 1
                return
            if last is None and len(self._logged) >= LOGGED_HOSTS:
                del self._logged[next(iter(self._logged))]
            self._logged[host, why] = _Logged(now)
        said: dict[str, object] = {"host": host, "why": why}
        if last is not None and last.unsaid:
            said["since_the_last_line"] = last.unsaid
        log.warning("a connection to the port of extents is refused", extra=said)
