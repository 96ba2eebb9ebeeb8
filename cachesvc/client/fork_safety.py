"""Delays forks until gRPC's threads have ended: a child that inherits a lock which they hold hangs in its first call.

gRPC ends its threads by itself, some 20 ms after the last channel was closed. A fork in that time waits for them.
"""

from __future__ import annotations

import os
import threading
import time

WAIT_S = 0.5
"""The limit of the wait: a call in another thread, or a program's own gRPC, may keep the threads for ever."""
_PAUSE_S, _QUIET_CHECKS = 0.001, 2
"""The pause between checks, and how many checks in a row must find no thread: a thread sets its name after it started."""
_THREADS = frozenset({"event_engine", "grpc_global_tim", "grpc_shutdown", "lifeguard"})
"""The names of gRPC's threads, cut to the 15 characters that the kernel keeps."""
_hooked = threading.Event()
_channel_made = threading.Event()


def delay_forks() -> None:
    """Have each fork from now on wait until this process's gRPC threads have ended. Call this before a channel is
    made."""
    _channel_made.set()
    if not _hooked.is_set():
        _hooked.set()
        os.register_at_fork(before=_wait)


def _wait() -> None:
    if _channel_made.is_set():
        _channel_made.clear()
        deadline, quiet = time.monotonic() + WAIT_S, 0
        while quiet < _QUIET_CHECKS and time.monotonic() < deadline:
            quiet = 0 if _threads_run() else quiet + 1
            time.sleep(_PAUSE_S)


def _threads_run() -> bool:
    return any(map(_is_of_grpc, os.listdir("/proc/self/task")))


def _is_of_grpc(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/comm") as comm:
            return comm.read().strip() in _THREADS
    except OSError:  # it ended just now, and may have started another
        return True
