"""Delays forks of this process while gRPC has threads in it."""

from __future__ import annotations

import os
import threading
import time

FORK_WAIT_S = 0.5
"""The limit of a fork's wait for gRPC's threads: a call in another thread, or a program's own gRPC, may keep them for
ever."""
_FORK_PAUSE_S, _QUIET_CHECKS = 0.001, 2
"""The pause between checks, and how many checks in a row must find no thread: a thread sets its name after it started."""
_GRPC_THREADS = frozenset({"event_engine", "grpc_global_tim", "grpc_shutdown", "lifeguard"})
"""The names of gRPC's threads, cut to the 15 characters that the kernel keeps."""
_forks_hooked, _channel_made = threading.Event(), threading.Event()


def delay_forks() -> None:
    """Have each fork from now on wait until this process's gRPC threads have ended: a child that inherits a lock which they
    hold hangs in its first call. gRPC ends them by itself, some 20 ms after the last channel was closed. Call this before a
    channel is made."""
    _channel_made.set()
    if not _forks_hooked.is_set():
        _forks_hooked.set()
        os.register_at_fork(before=_await_grpc)


def _await_grpc() -> None:
    if _channel_made.is_set():
        _channel_made.clear()
        deadline, quiet = time.monotonic() + FORK_WAIT_S, 0
        while quiet < _QUIET_CHECKS and time.monotonic() < deadline:
            quiet = 0 if any(map(_is_of_grpc, os.listdir("/proc/self/task"))) else quiet + 1
            time.sleep(_FORK_PAUSE_S)


def _is_of_grpc(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/comm") as comm:
            return comm.read().strip() in _GRPC_THREADS
    except OSError:  # it ended just now, and may have started another
        return True
