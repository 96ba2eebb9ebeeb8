"""Lanes: threads that may wait for a disk. Each runs one call after the other and answers on the event loop's thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from cachesvc.core.errors import CacheError, TierFailed
from cachesvc.core.histogram import Histogram
from cachesvc.tiers.tier import tier_error

log = logging.getLogger(__name__)
_T = TypeVar("_T")
_Call = Callable[[], None]


class Lane:
    """One thread with a queue of calls, whose length the core's fills, commits and evictions or the readers' waits bound.

    The thread is a daemon thread: a call that hangs in the kernel must not keep the process from ending.
    """

    def __init__(
        self, name: str, post: Callable[[_Call], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._post = post
        self._clock = clock
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._began_at: float | None = None
        self.waits = Histogram()
        """How long each call took that has ended."""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(
        self, work: Callable[[], _T], then: Callable[[_T], None], otherwise: Callable[[CacheError], None]
    ) -> None:
        """Run `work` on the thread, then exactly one of `then` and `otherwise` on the loop's, whatever `work` raises."""

        def run() -> None:
            try:
                result = work()
            except CacheError as error:
                self._answer(otherwise, error)
            except OSError as error:
                self._answer(otherwise, tier_error(error, self._name, "run a call"))
            except Exception as error:
                # A programming error: log it, and answer the caller all the same.
                log.exception("a call failed unexpectedly", extra={"lane": self._name})
                failure = TierFailed(
                    f"{self._name}: a call failed unexpectedly ({error!r}); see the daemon's log"
                )
                self._answer(otherwise, failure)
            else:
                self._answer(then, result)

        self._calls.put(run)

    def busy_s(self) -> float:
        """Seconds since the call under way began; 0 without one."""
        began_at = self._began_at
        return 0.0 if began_at is None else self._clock() - began_at

    def close(self, wait_s: float) -> bool:
        """End the thread after the call under way, and drop the queued ones; False where it does not end in time."""
        self._closed = True
        self._calls.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _answer(self, callback: Callable[[Any], None], value: object) -> None:
        if not self._closed:
            self._post(lambda: callback(value))

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not self._closed:
            self._began_at = self._clock()
            call()
            self.waits.observe(self._clock() - self._began_at)
            self._began_at = None
