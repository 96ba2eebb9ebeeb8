"""Finds an address that other machines cannot reach: the name of a host that its own hosts file maps to loopback."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from cachesvc.daemon.peers.block_wire import host_and_port


def hidden_from(address: str, others: Iterable[str]) -> str:
    """Return one of the addresses `others` that is on another machine, where `address` resolves to loopback; else "".

    Addresses are HOST:PORT. Blocks for name services.
    """
    if not _is_loopback(address):
        return ""
    return next((other for other in others if not _is_loopback(other)), "")


def _is_loopback(address: str) -> bool:
    """Return whether an address resolves to loopback. One that cannot be resolved counts as that: nothing is known."""
    host, port = host_and_port(address)
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:
        return True
    return all(ipaddress.ip_address(str(each[4][0]).partition("%")[0]).is_loopback for each in found)
