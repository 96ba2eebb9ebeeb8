"""CPU affinity that gives the object store's server its own core, as if it ran on another machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def on_own_core(pid: int) -> Iterator[bool]:
    """Give process `pid` the last core, and this process and its children the others, inside the context.
    Yields False and changes nothing on a machine with one core."""
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
