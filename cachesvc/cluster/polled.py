"""Membership from a source that is asked again and again: the option itself, a file, or DNS (`dns_service.py`).

The last list that a source gave holds while it fails.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from cachesvc.cluster.addresses import MAX_MEMBERS, host_addresses, join_address, split_address
from cachesvc.core.errors import InvalidInput
from cachesvc.core.placement.roster import Endpoint

log = logging.getLogger(__name__)
MAX_REASON = 200
"""Characters of a reason in the log: it may quote a line of any length."""
POLL_S = 0.5
"""The interval at which a file is looked at."""
MAX_BYTES = 1 << 20
"""The largest file: 4,096 lines of 253 bytes."""
_Stamp = tuple[int, int, int]


class MemberFile:
    """The file of `file:///PATH`, one HOST:PORT a line; `#` begins a comment.

    A file that is written in place may be seen half written. A changed file is read once it has kept its size, time and
    inode for one poll, and an invalid file is no list.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: _Stamp | None = None
        self._read: _Stamp | None = None

    def ask(self, last: LastList, closed: threading.Event) -> float:
        try:
            self._look(last)
        except (OSError, ValueError) as error:  # InvalidInput and UnicodeDecodeError are ValueErrors
            self._read = None
            last.failed(str(error))
        return POLL_S

    def _look(self, last: LastList) -> None:
        stamp = _stamp(self._path)
        settled = self._seen in (None, stamp)
        self._seen = stamp
        if settled and stamp != self._read:
            last.found(_members(self._path))
            self._read = stamp


def _stamp(path: str) -> _Stamp:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _members(path: str) -> frozenset[Endpoint]:
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{path} has more than {MAX_BYTES:,} bytes")
    lines = (line.partition("#")[0].strip() for line in data.decode().splitlines())
    return frozenset(Endpoint(join_address(*split_address(line))) for line in lines if line)


class LastList:
    """Tells `changed` of changes of the members, and logs each outage of their source once."""

    def __init__(self, source: str, changed: Changed = lambda _: None) -> None:
        self._source = source
        self.changed = changed
        self._members: frozenset[Endpoint] = frozenset()
        self.trouble = ""
        """Why the source failed the last time; "" where it did not."""

    def found(self, members: frozenset[Endpoint]) -> None:
        """Take the members that the source has now. No member, or more than `MAX_MEMBERS`, is a failure of the source."""
        if not members:
            return self.failed("it has no members")
        if len(members) > MAX_MEMBERS:
            return self.failed(f"it has more than {MAX_MEMBERS:,} members")
        if self.trouble:
            log.info("the cluster's members are known again", extra={"cluster": self._source})
        self.trouble = ""
        if members != self._members:
            self._members = members
            self.changed(members)

    def failed(self, reason: str) -> None:
        """Keep the last list. `reason` is logged unless the last attempt failed too."""
        said: dict[str, object] = {"cluster": self._source, "reason": reason[:MAX_REASON]}
        if not self.trouble and self._members:
            log.warning(
                "the cluster's members cannot be read; the last list holds",
                extra=said | {"members": len(self._members)},
            )
        elif not self.trouble:
            log.warning("the cluster's members cannot be read yet; this node is alone", extra=said)
        self.trouble = reason[:MAX_REASON] or "it fails"


class StaticList:
    """The hosts of `static:HOSTS`. Raises InvalidInput."""

    def __init__(self, hosts: str) -> None:
        self._members = frozenset(map(Endpoint, host_addresses(hosts)))

    def ask(self, last: LastList, closed: threading.Event) -> float:
        last.found(self._members)
        return threading.TIMEOUT_MAX


class MemberSource(Protocol):
    """A source that is asked for its members again and again."""

    def ask(self, last: LastList, closed: threading.Event) -> float:
        """Tell `last` the members or the failure; return the seconds until the next question. It returns within 2 s after
        `closed` is set."""
        ...


class PolledMembership:
    """Asks `source` until `close`; `name` stands in the log."""

    def __init__(self, name: str, source: MemberSource) -> None:
        self._last = LastList(name)
        self._source = source
        self._closed = threading.Event()

    @property
    def trouble(self) -> str:
        """Why the source failed the last time."""
        return self._last.trouble

    def watch(self, changed: Changed) -> None:
        """Tell `changed` of the members until `close`."""
        self._last.changed = changed
        while not self._closed.is_set():
            self._closed.wait(self._source.ask(self._last, self._closed))

    def close(self) -> None:
        self._closed.set()


@dataclass(frozen=True, slots=True)
class Registration:
    """This node's own entry, where members do so: its name, the address at which peers reach it, and its zone."""

    name: str
    address: str
    zone: str = ""


Changed = Callable[[frozenset[Endpoint]], None]


class Membership(Protocol):
    """A source of members. An error of the source (DNS is empty, etcd is gone) is no change: the last list holds."""

    def watch(self, changed: Changed) -> None:
        """Call `changed` with all members, this node included or not, first as soon as they are known and then whenever
        they change. Blocks until `close`; runs once, on a thread of its own. An error that `changed` raises ends it."""
        ...

    @property
    def trouble(self) -> str:
        """Why the list cannot be read now; "" while it can, and before the first try."""
        ...

    def close(self) -> None:
        """End `watch` within 2 s, from any thread, without waiting for it. Before `watch` returns it removes this node's
        own entry where there is one."""
        ...
