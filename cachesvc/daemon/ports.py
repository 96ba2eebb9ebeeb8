"""Checks that the TCP ports of a daemon are free, before any of its sockets is bound."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterable
from contextlib import ExitStack

from cachesvc.config import Settings
from cachesvc.core.errors import InvalidInput

FREE_S, FREE_POLL_S = 3.0, 0.1
"""After a daemon is killed, the process that answers peers keeps its ports until it sees the end of its channel."""


def addresses(settings: Settings) -> dict[str, str]:
    """Return HOST:PORT of each option that opens a port."""
    given = {"--listen": settings.listen, "--metrics": settings.metrics}
    if settings.cluster is not None:
        given["--advertise"] = settings.cluster.advertise
        given["--advertise (extents)"] = next_port(settings.cluster.advertise)
    return {option: address for option, address in given.items() if address}


def check_addresses(settings: Settings, known: Iterable[str]) -> None:
    """Raise InvalidInput where a port cannot be bound. Ports of the `known` addresses belong to the daemon that is taken
    over. They become free when it ends, and by then it is too late to learn that another port is taken."""
    theirs = {_split(address)[1] for address in known}
    with ExitStack() as bound:
        for option, address in addresses(settings).items():
            if _split(address)[1] not in theirs:
                bound.enter_context(_bound(option, address))


def next_port(address: str) -> str:
    """Return HOST:PORT with the next port: the one that sends extents to peers."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + 1}"


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _bound(option: str, address: str) -> socket.socket:
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            family, _, _, _, where = socket.getaddrinfo(*_split(address), type=socket.SOCK_STREAM)[0]
            return socket.create_server(where[:2], family=family)
        except (OSError, UnicodeError) as error:
            if time.monotonic() >= deadline:
                reason = getattr(error, "strerror", None) or error
                raise InvalidInput(
                    f"{option} {address} cannot be bound ({reason}); choose an address that is free"
                ) from None
        time.sleep(FREE_POLL_S)
