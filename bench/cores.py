"""Which cores a process runs on, as if the object store's server were another machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def apart(pid: int) -> Iterator[bool]:
    """Inside, process `pid` has the last core alone, and this process and those that it starts have the others.
    False, and nothing is done, on a machine of one core."""
    cores = os.sched_getaffinity(0)
    last = {max(cores)}
    if cores == last:
        yield False
        return
    _confine(pid, last)
    os.sched_setaffinity(0, cores - last)
    try:
        yield True
    finally:
        os.sched_setaffinity(0, cores)
        _confine(pid, cores)


def _confine(pid: int, cores: set[int]) -> None:
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with suppress(ProcessLookupError):  # a thread that has just ended
            os.sched_setaffinity(int(thread.name), cores)
