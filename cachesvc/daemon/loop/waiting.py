"""Waits of control calls, on gRPC's threads, for work of the event loop."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

from cachesvc.core import errors
from cachesvc.daemon.loop.loop import Loop

ANSWER_S = 0.2
"""How often a waiting call checks that its caller has not left and that the daemon is not stopping."""
STOPPING = "the daemon is stopping; start it again: cachesvc serve"
_Answer = TypeVar("_Answer")


class Caller(Protocol):
    """The caller that waits for an answer, such as gRPC's context of a call."""

    def is_active(self) -> bool:
        """Tell whether the caller still waits."""
        ...


class CallWaits:
    """Waits that also end when the caller leaves or the daemon stops."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def until(
        self,
        begin: Callable[[Callable[[], None]], None],
        context: Caller,
        timeout_s: float = math.inf,
    ) -> None:
        """Run `begin(done)` on the loop's thread and wait until it calls `done`.

        Raises queue.Empty at the timeout, DaemonUnavailable when the daemon stops, DeadlineExceeded when the caller leaves.
        """
        done: queue.Queue[None] = queue.Queue()
        self._loop.call(lambda: begin(partial(done.put, None)))
        self.next(done, context, timeout_s)

    def next(self, answers: queue.Queue[_Answer], context: Caller, timeout_s: float = math.inf) -> _Answer:
        """Wait for the next answer of a job. Raises as `until` does."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return answers.get(timeout=ANSWER_S)
            except queue.Empty:
                if self._loop.ended:
                    raise errors.DaemonUnavailable(STOPPING) from None
                if not context.is_active():
                    raise errors.DeadlineExceeded("the caller did not wait for the answer") from None
                if time.monotonic() >= deadline:
                    raise
