"""Answers the probes of Kubernetes and load balancers from what this node knows of itself. No source or peer is asked."""

from __future__ import annotations

import threading
from collections.abc import Callable

from cachesvc.daemon.loop.loop import Loop

ANSWER_S = 4.0
"""A loop that takes longer to answer is no longer alive. Probes give up after seconds, too."""


class Health:
    """`waits`: a cluster's first list of members is waited for. Safe from any thread."""

    def __init__(self, loop: Loop, waits: Callable[[], bool], answer_s: float = ANSWER_S) -> None:
        """Made when the tiers are open and what they hold is known."""
        self._loop, self._waits, self._answer_s = loop, waits, answer_s
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
        if self._waits():
            return "waiting for the first list of members"
        return self.alive()
