"""Fillers run when nobody else wants the core, and give it up at once."""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress
from platform import machine

NICE = 19
SLICE_NS = 100_000_000
"""The longest that the scheduler takes. A task that wakes up displaces one of a longer slice at once, and waits
for the slice of another, here some milliseconds: Linux 6.12, sched_setattr(2), `sched_runtime`."""
_CALLS = {"x86_64": 314, "aarch64": 274}
_ATTRIBUTES = struct.Struct("=IIQiIQQQ")


def run_in_background() -> None:
    """For the calling thread and all that it starts. Older kernels and other machines take the niceness alone."""
    niceness = os.nice(NICE)
    number = _CALLS.get(machine())
    if number is None:
        return
    wanted = _ATTRIBUTES.pack(_ATTRIBUTES.size, os.SCHED_OTHER, 0, niceness, 0, SLICE_NS, 0, 0)
    with suppress(AttributeError, OSError):  # the C library may be another; the call, refused
        ctypes.CDLL(None).syscall(number, 0, wanted, 0)
