"""Waits until the TCP ports of a daemon are free, before any of its sockets is bound."""

from __future__ import annotations

import errno
import logging
import socket
import time
from contextlib import ExitStack

from cachesvc.config import Settings
from cachesvc.core.errors import InvalidInput, NotReady

log = logging.getLogger(__name__)
FREE_S, FREE_POLL_S = 60.0, 0.1
"""A node that boots may not resolve names yet. After a daemon is killed, the process that answers peers keeps its ports
until it sees the end of its channel."""
REPLACES_S = 3.0
"""The same for a daemon that replaces another: readers wait, and where it fails the one before is started again."""
_FORBIDDEN = (errno.EACCES, errno.EPERM)


def addresses(settings: Settings) -> dict[str, str]:
    """Return HOST:PORT of each option that opens a port."""
    given = {"--listen": settings.listen, "--metrics": settings.metrics}
    if settings.cluster is not None:
        given["--advertise"] = settings.cluster.advertise
        given["--advertise (extents)"] = next_port(settings.cluster.advertise)
    return {option: address for option, address in given.items() if address}


def wait_for_addresses(settings: Settings, wait_s: float) -> None:
    """Wait until all ports can be bound.

    Raises NotReady where one cannot be bound after `wait_s` seconds, InvalidInput where none ever can.
    """
    deadline = time.monotonic() + wait_s
    with ExitStack() as bound:
        for option, address in addresses(settings).items():
            bound.enter_context(_bound(option, address, deadline))


def next_port(address: str) -> str:
    """Return HOST:PORT with the next port: the one that sends extents to peers."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _bound(option: str, address: str, deadline: float) -> socket.socket:
    logged = False
    while True:
        try:
            family, _, _, _, where = socket.getaddrinfo(*_split(address), type=socket.SOCK_STREAM)[0]
            return socket.create_server(where[:2], family=family)
        except (OSError, UnicodeError) as error:
            reason = str(getattr(error, "strerror", None) or error).partition(" (while")[0]
            trouble = f"{option} {address} cannot be bound ({reason})"
            if isinstance(error, UnicodeError) or error.errno in _FORBIDDEN:
                raise InvalidInput(f"{trouble}; choose another address") from None
            if time.monotonic() >= deadline:
                raise NotReady(f"{trouble}; free it, or choose an address that is free") from None
        if not logged:
            log.warning("%s: waiting up to %.0f s for it", trouble, deadline - time.monotonic())
        logged = True
        time.sleep(FREE_POLL_S)
