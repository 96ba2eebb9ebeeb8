"""How a call on one of gRPC's threads waits for what the loop does."""

from __future__ import annotations

import math
import queue
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import grpc

from cachesvc.core import errors
from cachesvc.daemon.loop.loop import Loop

ANSWER_S = 0.2
"""How often a call that waits for a job looks whether caller and daemon are still there."""
STOPPING = "the daemon is stopping; start it again: cachesvc serve"
_Answer = TypeVar("_Answer")


class Waiting:
    """Waits that end with the caller and with the daemon."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop

    def until(
        self,
        begin: Callable[[Callable[[], None]], None],
        context: grpc.ServicerContext,
        patience_s: float = math.inf,
    ) -> None:
        """Wait for what `begin`, on the loop's thread, is given to be called. Raises queue.Empty when patience is over."""
        done: queue.Queue[None] = queue.Queue()
        self._loop.call(lambda: begin(partial(done.put, None)))
        self.next(done, context, patience_s)

    def next(
        self, answers: queue.Queue[_Answer], context: grpc.ServicerContext, patience_s: float = math.inf
    ) -> _Answer:
        """The next answer of a job. A caller that went away frees its thread, and so does a daemon that ends. Raises
        queue.Empty when patience is over."""
        until = time.monotonic() + patience_s
        while True:
            try:
                return answers.get(timeout=ANSWER_S)
            except queue.Empty:
                if self._loop.ended:
                    raise errors.DaemonUnavailable(STOPPING) from None
                if not context.is_active():
                    raise errors.DeadlineExceeded("the caller did not wait for the answer") from None
                if time.monotonic() >= until:
                    raise
