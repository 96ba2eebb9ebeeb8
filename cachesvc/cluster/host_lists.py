"""Slurm's lists of hosts, as `$SLURM_JOB_NODELIST` has them: `rack[1-2]node[01-16,20],login`.

Own code: python-hostlist is GPL, which our licence excludes, and ClusterShell is 16,000 lines for this one function.
"""

from __future__ import annotations

import itertools
import re

from cachesvc.cluster.addresses import MAX_MEMBERS, join_address, split_address
from cachesvc.core.errors import InvalidInput

_ITEM = re.compile(r"(?:[^\[\],]|\[[^\[\]]*\])+")
_RANGES = re.compile(r"\[([0-9,-]+)\]", re.ASCII)
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?", re.ASCII)
_WITH_PORT = re.compile(r"(?:.*[^:\]]|.*\]):[^:\[\]]*")


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
