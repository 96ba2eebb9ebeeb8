"""Forks meet none of gRPC's threads: a child that inherits their locks, held, hangs in its own first call.

gRPC ends its threads by itself, some 20 ms after the last channel was closed. A fork in that time waits for them.
"""

from __future__ import annotations

import os
import threading
import time

WAIT_S = 0.5
"""For no longer: a call under way in another thread, or a program's own gRPC, may keep them for ever."""
_LOOKS_S, _QUIET = 0.001, 2
"""Looks at them, and how many in a row that find none: a thread names itself some time after it started."""
_THREADS = frozenset({"event_engine", "grpc_global_tim", "grpc_shutdown", "lifeguard"})
"""What gRPC calls its threads, cut to the 15 characters that the kernel keeps."""
_hooked = threading.Event()
_spoke = threading.Event()


def rest_before_forks() -> None:
    """Have each fork from now on wait until this process's gRPC has come to rest. To be called before a channel is
    made."""
    _spoke.set()
    if not _hooked.is_set():
        _hooked.set()
        os.register_at_fork(before=_rest)


def _rest() -> None:
    if _spoke.is_set():
        _spoke.clear()
        deadline, quiet = time.monotonic() + WAIT_S, 0
        while quiet < _QUIET and time.monotonic() < deadline:
            quiet = 0 if _running() else quiet + 1
            time.sleep(_LOOKS_S)


def _running() -> bool:
    return any(map(_is_grpcs, os.listdir("/proc/self/task")))


def _is_grpcs(thread: str) -> bool:
    try:
        with open(f"/proc/self/task/{thread}/comm") as comm:
            return comm.read().strip() in _THREADS
    except OSError:  # it ended just now, and may have started another
        return True
