"""Background scheduling: a filler runs when no other process wants the core, and gives it up at once."""

from __future__ import annotations

import ctypes
import os
import struct
from contextlib import suppress
from platform import machine

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
