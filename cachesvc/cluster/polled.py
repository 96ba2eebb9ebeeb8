"""Membership from a source that is asked again and again. The last list that it gave holds while it fails."""

from __future__ import annotations

import logging
import threading
from typing import Protocol

from cachesvc.cluster.addresses import MAX_MEMBERS, host_addresses
from cachesvc.cluster.membership import Changed, Endpoint

log = logging.getLogger(__name__)
MAX_REASON = 200
"""Characters of a reason in the log: it may quote a line of any length."""


class LastList:
    """Tells changes of the members, and logs each outage of their source once."""

    def __init__(self, source: str, changed: Changed) -> None:
        self._source = source
        self._changed = changed
        self._members: frozenset[Endpoint] = frozenset()
        self._away = False

    def found(self, members: frozenset[Endpoint]) -> None:
        """Take the members that the source has now. No member, or more than `MAX_MEMBERS`, is a failure of the source."""
        if not members:
            return self.failed("it has no members")
        if len(members) > MAX_MEMBERS:
            return self.failed(f"it has more than {MAX_MEMBERS:,} members")
        if self._away:
            log.info("the cluster's members are known again", extra={"cluster": self._source})
        self._away = False
        if members != self._members:
            self._members = members
            self._changed(members)

    def failed(self, reason: str) -> None:
        """Keep the last list. `reason` is logged unless the last attempt failed too."""
        if not self._away:
            kept = {"cluster": self._source, "reason": reason[:MAX_REASON], "members": len(self._members)}
            log.warning("the cluster's members cannot be read; the last list holds", extra=kept)
        self._away = True


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
        self._name = name
        self._source = source
        self._closed = threading.Event()

    def watch(self, changed: Changed) -> None:
        """Tell `changed` of the members until `close`."""
        last = LastList(self._name, changed)
        while not self._closed.is_set():
            self._closed.wait(self._source.ask(last, self._closed))

    def close(self) -> None:
        self._closed.set()
