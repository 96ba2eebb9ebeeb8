"""Connections to the control socket: gRPC bounds how many there are, and this, whose.

gRPC accepts connections and tells nobody who made them. The kernel does, of any descriptor of this process: where most
places are taken, whoever holds the most loses some. Its clients connect again, as after any broken connection.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from cachesvc.daemon.access.tenants import peer_of

log = logging.getLogger(__name__)
IDLE_S = 60.0
"""A connection without a call for so long, or twice that, ends; a client connects again with its next one."""
HANDSHAKE_S = 5.0
"""For a connection to become one of gRPC's."""
LOOK_S = 1.0


def crowd_limits(connections: int) -> list[tuple[str, int]]:
    """gRPC's, for so many connections to each address."""
    return [
        ("grpc.max_allowed_incoming_connections", connections),
        ("grpc.max_connection_idle_ms", int(IDLE_S * 1000)),
        ("grpc.server_handshake_timeout_ms", int(HANDSHAKE_S * 1000)),
    ]


class Crowds:
    """Looks once a second, on a thread of its own, until it is closed."""

    def __init__(self, path: str, connections: int) -> None:
        """`path`: the control socket's, absolute. `connections`: how many there may be."""
        self._path, self._most = path, connections
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="crowds", daemon=True).start()

    def close(self) -> None:
        """Look no more."""
        self._closed.set()

    def _run(self) -> None:
        while not self._closed.wait(LOOK_S):
            try:
                if _count(self._path) > self._most * 3 // 4:
                    thin(self._path, self._most // 2)
            except OSError as error:  # no descriptor to look with, just now
                log.warning("control connections cannot be counted", extra={"error": error.strerror})


def thin(path: str, most: int) -> None:
    """Close connections to a socket of ours until `most` are left, of those who have the most; none of our own user."""
    users: defaultdict[int, list[socket.socket]] = defaultdict(list)
    for each in _connections(path):
        users[peer_of(each).uid].append(each)
    excess = sum(map(len, users.values())) - most
    closed = Counter[int]()
    others = {uid: held for uid, held in users.items() if uid != os.geteuid()}
    while excess > 0 and any(others.values()):
        uid = max(others, key=lambda each: len(others[each]))
        with suppress(OSError), others[uid].pop() as crowding:  # it may have gone by itself
            crowding.shutdown(socket.SHUT_RDWR)
        closed[uid] += 1
        excess -= 1
    for held in users.values():
        for each in held:
            each.close()
    log.warning("too many control connections", extra={"closed_by_uid": dict(closed)})


def _count(path: str) -> int:
    """Connections to a socket, roughly: a look at the kernel's list, which is short work."""
    return Path("/proc/self/net/unix").read_bytes().count(os.fsencode(f" {path}\n"))


def _connections(path: str) -> Iterator[socket.socket]:
    """Duplicates of our ends: a number that gRPC closes meanwhile and the kernel gives away again is not ours to shut."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            if (
                found.family == socket.AF_UNIX
                and found.getsockname() == path
                and not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            ):
                yield found
            else:
                found.close()
