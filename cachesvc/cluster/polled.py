"""Membership from a source that is asked again and again."""

from __future__ import annotations

import threading
from typing import Protocol

from cachesvc.cluster.last_list import LastList
from cachesvc.cluster.membership import Changed


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
