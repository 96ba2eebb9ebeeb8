"""Answers the probes of Kubernetes and load balancers from what this node knows of itself. No source or peer is asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Protocol

ANSWER_S = 4.0
"""A loop that takes longer to answer is no longer alive. Probes give up after seconds, too."""
FIRST_LIST_S = 30.0
"""How long a node waits for its first list of members; then it serves its own readers without one."""


class _Members(Protocol):
    @property
    def knows_members(self) -> bool: ...


class _Loop(Protocol):
    ended: bool

    def post(self, work: Callable[[], None]) -> None: ...


class Health:
    """`members`: None without a cluster. Safe from any thread."""

    def __init__(
        self,
        loop: _Loop,
        members: _Members | None,
        clock: Callable[[], float] = time.monotonic,
        answer_s: float = ANSWER_S,
    ) -> None:
        """Made when the tiers are open and what they hold is known."""
        self._loop, self._members, self._clock, self._answer_s = loop, members, clock, answer_s
        self._since = clock()
        self._leaving = False

    def leave(self) -> None:
        """Note that this daemon ends, and takes no new readers."""
        self._leaving = True

    def alive(self) -> str:
        """Return why the daemon should be started again; "" while its event loop answers."""
        answered = threading.Event()
        self._loop.post(answered.set)
        return (
            ""
            if answered.wait(self._answer_s)
            else f"the event loop has not answered for {self._answer_s:.0f} s"
        )

    def ready(self) -> str:
        """Return why this node cannot serve its own readers; "" if it can."""
        if self._leaving or self._loop.ended:
            return "this daemon is stopping"
        waits = self._members is not None and not self._members.knows_members
        if waits and self._clock() - self._since < FIRST_LIST_S:
            return "waiting for the first list of members"
        return self.alive()
