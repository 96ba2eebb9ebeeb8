"""Connections to peers that wait for their next request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import NamedTuple

IDLE_S = 20.0
"""An idle connection is used again within this time, before the server would close it."""
IDLE_CONNECTIONS = 2
"""Idle connections that are kept for each address."""


class Connection(NamedTuple):
    """A connection and the generation of the certificates that it was made with."""

    connection: socket.socket
    generation: int


class IdleConnections:
    """Connections that wait for their next request, by address. Thread-safe."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._kept: dict[str, list[tuple[float, Connection]]] = {}
        """The time since which each is idle; the last was used last."""
        self._swept_at = now()

    def take(self, address: str, generation: int) -> socket.socket | None:
        """Return a connection that was made with the current certificates, or None."""
        with self._lock:
            kept = self._kept.get(address, [])
            while kept:
                since, made = kept.pop()
                if made.generation == generation and self._now() - since < IDLE_S:
                    return made.connection
                made.connection.close()
        return None

    def give_back(self, address: str, made: Connection) -> None:
        """Keep a connection whose last request was answered."""
        with self._lock:
            kept = self._kept.setdefault(address, [])
            kept.append((self._now(), made))
            if len(kept) > IDLE_CONNECTIONS:
                kept.pop(0)[1].connection.close()
            if self._now() - self._swept_at >= IDLE_S:
                self._sweep()

    def _sweep(self) -> None:
        """Close what was idle for too long, also of addresses that are never asked again."""
        self._swept_at = now = self._now()
        for address, kept in list(self._kept.items()):
            while kept and now - kept[0][0] >= IDLE_S:
                kept.pop(0)[1].connection.close()
            if not kept:
                del self._kept[address]

    def close(self) -> None:
        """Close all."""
        with self._lock:
            for kept in self._kept.values():
                for _, made in kept:
                    made.connection.close()
            self._kept.clear()
