"""The addresses of members: HOST:PORT, where an IPv6 address stands in brackets."""

from __future__ import annotations

import ipaddress
import re

from cachesvc.core.errors import InvalidInput

MAX_MEMBERS = 4096
"""The most members of a cluster. A longer list is a mistake, such as `node[1-99999999]`."""
MAX_PORT = 65535
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)


def split_address(text: str) -> tuple[str, int]:
    """Return the host, without brackets, and the port of HOST:PORT. Raises InvalidInput."""
    host, _, port = text.rpartition(":")
    if host[:1] == "[" and host[-1:] == "]":
        host, good = host[1:-1], _is_ipv6(host[1:-1])
    else:
        good = _HOST.fullmatch(host) is not None
    if not good or not _PORT.fullmatch(port) or not 0 < int(port) <= MAX_PORT:
        raise InvalidInput(f"{text!r} is not an address; write HOST:PORT, or [IPV6]:PORT")
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """Return HOST:PORT, with brackets around an IPv6 address."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _is_ipv6(host: str) -> bool:
    try:
        return ipaddress.IPv6Address(host) is not None
    except ValueError:
        return False
