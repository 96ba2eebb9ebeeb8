"""A pool that makes do with the threads it has, where no more can be started: the node's limit of processes, or memory."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)


class Threads(ThreadPoolExecutor):
    """A base class, since gRPC takes no other executor. Its own `submit` raises once it has taken the work in; gRPC's
    thread that serves dies of that, and nobody is answered any more."""

    def __init__(self, most: int, name: str) -> None:
        """Starts one thread, so that what is submitted is always done. Raises RuntimeError when it cannot."""
        super().__init__(most, thread_name_prefix=name)
        self._short_at = 0
        self.submit(lambda: None)

    def _adjust_thread_count(self) -> None:
        try:
            super()._adjust_thread_count()
        except RuntimeError:
            if not self._threads:
                raise
            if self._short_at != len(self._threads):
                self._short_at = len(self._threads)
                short = {"of": self._thread_name_prefix, "threads": self._short_at}
                log.warning("no more threads can be started; allow more processes or memory", extra=short)
