"""A thread pool that continues with the threads it has when the system refuses to start more, and background
scheduling: a filler runs when no other process wants the core, and gives it up at once."""

from __future__ import annotations

import ctypes
import logging
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from platform import machine

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


NICE = 19
SLICE_NS = 100_000_000
"""The longest time slice that the scheduler accepts. A task that wakes up preempts one with a longer slice at once;
otherwise it waits for the end of the slice, here some milliseconds. Linux 6.12, sched_setattr(2), `sched_runtime`."""
_CALLS = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def run_in_background() -> None:
    """Lower the priority of the calling thread and of all that it starts. Older kernels set only the niceness."""
    niceness = os.nice(NICE)
    number = _CALLS.get(machine())
    if number is None:
        return
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, niceness, 0, SLICE_NS, 0, 0)
    with suppress(
        AttributeError, OSError
    ):  # a C library without syscall(), or a call that the kernel refuses
        ctypes.CDLL(None).syscall(number, 0, wanted, 0)
