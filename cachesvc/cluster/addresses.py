"""The addresses of members: HOST:PORT, where an IPv6 address stands in brackets; and Slurm's lists of hosts, as
`$SLURM_JOB_NODELIST` has them: `rack[1-2]node[01-16,20],login`.

Own code: python-hostlist is GPL, which our licence excludes, and ClusterShell is 16,000 lines for this one function.
"""

from __future__ import annotations

import ipaddress
import itertools
import re

from cachesvc.core.errors import InvalidInput

MAX_MEMBERS = 4096
"""The most members of a cluster. A longer list is a mistake, such as `node[1-99999999]`."""
MAX_PORT = 65535
_HOST = re.compile(r"(?=.{1,253}$)[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_.])?", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}", re.ASCII)
_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_RANGES = re.compile(r"\[([0-9,-]+)\]", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_WITH_PORT = re.compile(r"(?:.*[^:\]]|.*\]):[^:\[\]]*")


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


def host_addresses(text: str) -> list[str]:
    """Return HOST:PORT of each host of a list, whose hosts are separated by commas outside brackets.

    A host without a port has the port of the next host with one, so a port may follow a whole list of Slurm. Raises
    InvalidInput for text that is no list, for more than `MAX_MEMBERS` hosts, and where the last host has no port.
    """
    found: list[str] = []
    port = ""
    for item in reversed(_items(text)):
        if _WITH_PORT.fullmatch(item):
            item, _, port = item.rpartition(":")
        elif not port:
            raise InvalidInput(
                f"the last host of {text!r} has no port; write HOST:PORT, such as node[01-16]:7070"
            )
        hosts = _expanded(item, MAX_MEMBERS - len(found))
        found[:0] = [join_address(*split_address(f"{host}:{port}")) for host in hosts]
    return list(dict.fromkeys(found))


def _items(text: str) -> list[str]:
    items = _ITEM.findall(text)
    if not items or ",".join(items) != text:
        raise InvalidInput(f"{text!r} is not a list of hosts; write node[01-16]:7070 or a:7070,b:7070")
    return items


def _expanded(item: str, limit: int) -> list[str]:
    """Return the hosts of one item, in the order of their numbers."""
    parts = _RANGES.split(item)  # text and ranges by turns
    numbers = [_numbers(part, limit) if odd % 2 else [part] for odd, part in enumerate(parts)]
    hosts = ["".join(each) for each in itertools.islice(itertools.product(*numbers), limit + 1)]
    if len(hosts) > limit:
        raise InvalidInput(f"the list of hosts has more than {MAX_MEMBERS:,} hosts")
    return hosts


def _numbers(ranges: str, limit: int) -> list[str]:
    """Return the numbers of `01-03,7`, padded with zeros as the first of each range; one more than `limit` at most."""
    found: list[str] = []
    for part in ranges.split(","):
        match = _RANGE.fullmatch(part)
        first, last = (match[1], match[2] or match[1]) if match else ("1", "0")
        if int(first) > int(last):
            raise InvalidInput(f"[{ranges}] is not a range of hosts; write [01-16,20]")
        numbers = range(int(first), int(last) + 1)
        found += [f"{number:0{len(first)}}" for number in numbers[: limit + 1 - len(found)]]
    return found
