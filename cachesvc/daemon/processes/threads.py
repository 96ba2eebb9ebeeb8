"""A thread pool that continues with the threads it has when the system refuses to start more."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)


class ThreadPool(ThreadPoolExecutor):
    """A subclass, since gRPC accepts no other executor.

    ThreadPoolExecutor's own `submit` queues the work and then raises; gRPC's serving thread dies of that error, and no
    call is answered any more.
    """

    def __init__(self, max_threads: int, name: str) -> None:
        """Start one thread, so that submitted work always runs. Raises RuntimeError when it cannot be started."""
        super().__init__(max_threads, thread_name_prefix=name)
        self._limited_at = 0
        self.submit(lambda: None)

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise
            if self._limited_at != len(self._threads):
                self._limited_at = len(self._threads)
                extra = {"of": self._thread_name_prefix, "threads": self._limited_at}
                log.warning("no more threads can be started; allow more processes or memory", extra=extra)
