"""The daemon's one event loop: descriptors, timers, and work posted from other threads.

The core, the grants and the filler pool run on its thread; nothing there may block for longer than a grant may take.
"""

from __future__ import annotations

import math
import os
import select
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from cachesvc.core.errors import CacheError, DaemonUnavailable

ENDED_S = 0.2
"""How often a thread that waits for the loop checks that the loop has not ended."""
_T = TypeVar("_T")


class Loop:
    """Runs until `stop`. `post`, `call` and `stop` are safe from any thread."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._ready: dict[int, Callable[[], object]] = {}
        self._unwatched: set[int] = set()
        """Descriptors unwatched since this round began."""
        self._posted: deque[Callable[[], None]] = deque()
        self._woken, self.wake_fd = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        """`wake_fd` is also for `signal.set_wakeup_fd`: otherwise a signal that comes just before the wait, or to another
        thread, is handled only at the next event."""
        self._stopped = False
        self.ended = False
        """Posted work no longer runs."""
        self._thread = 0
        self.watch(self._woken, self._drain)

    def watch(self, fd: int, ready: Callable[[], object]) -> None:
        """Call `ready` whenever `fd` is readable."""
        self._epoll.register(fd, select.EPOLLIN)
        self._ready[fd] = ready

    def unwatch(self, fd: int) -> None:
        """Stop watching `fd`; call it before closing `fd`."""
        del self._ready[fd]
        self._epoll.unregister(fd)
        self._unwatched.add(fd)

    def post(self, work: Callable[[], None]) -> None:
        """Run `work` soon on the loop's thread."""
        self._posted.append(work)
        self._wake()

    def call(self, work: Callable[[], _T]) -> _T:
        """Run `work` on the loop's thread and wait for its result or error. Raises DaemonUnavailable once the loop has
        ended."""
        if threading.get_ident() == self._thread:
            return work()
        results: list[_T] = []
        errors: list[Exception] = []
        answered = threading.Event()

        def run() -> None:
            try:
                results.append(work())
            except Exception as error:
                errors.append(error)
                if not isinstance(error, (CacheError, OSError, ValueError)):
                    raise
            finally:
                answered.set()

        self.post(run)
        while not answered.wait(ENDED_S):
            if self.ended:
                raise DaemonUnavailable("the daemon is stopping; start it again: cachesvc serve")
        if errors:
            # Popped: an error refers to these frames. A reference back would keep their objects, perhaps a request of
            # megabytes, until the next full garbage collection.
            raise errors.pop()
        return results.pop()

    def run(
        self, next_deadline: Callable[[], float], tick: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        """Serve until `stop`, and call `tick` whenever `next_deadline()` has passed; only work on this thread changes
        the deadline."""
        self._thread = threading.get_ident()
        try:
            due = next_deadline()
            while not self._stopped:
                self._serve(None if due == math.inf else max(0.0, due - clock()))
                due = next_deadline()
                if due <= clock():
                    tick()
                    due = next_deadline()
        finally:
            self.ended = True

    def stop(self) -> None:
        """End `run` after the current round; safe from any thread and from signal handlers."""
        self._stopped = True
        self._wake()

    def close(self) -> None:
        """Close the loop's own descriptors."""
        self._epoll.close()
        os.close(self._woken)
        os.close(self.wake_fd)

    def _wake(self) -> None:
        with suppress(BlockingIOError):  # a full pipe wakes as well
            os.write(self.wake_fd, b"\0")

    def _serve(self, wait_s: float | None) -> None:
        self._unwatched.clear()
        for fd, _ in self._epoll.poll(wait_s):
            # A callback earlier in this round may have closed this descriptor and opened another of the same number.
            if fd not in self._unwatched:
                self._ready[fd]()

    def _drain(self) -> None:
        os.read(self._woken, 1 << 16)
        for _ in range(
            len(self._posted)
        ):  # work that these post runs in the next round, after waiting readers
            self._posted.popleft()()
