"""What a forked child must drop: inherited descriptors keep leases and connections of its parent alive. And what it
must not: objects whose threads stayed with its parent."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

CHILD_SAYS = (
    "this iteration of the DataLoader began in the process that forked this one, and its workers serve that process; "
    "begin one of its own here"
)


class Abandoned(Protocol):
    """Something with descriptors that a child must not keep."""

    def abandon(self) -> None:
        """In a forked child: close what was inherited, take no lock, say nothing to anybody."""
        ...


_living: weakref.WeakSet[Abandoned] = weakref.WeakSet()
_hooked = threading.Event()
_forks_workers = threading.local()


def abandon_in_children(owner: Abandoned) -> None:
    """Have `owner.abandon()` called in every child forked from now on, as long as it lives."""
    _living.add(owner)
    _hook()


@contextmanager
def forks_workers() -> Iterator[None]:
    """Children that this thread forks meanwhile never collect garbage that they inherited: an object that joins its
    threads as it dies (torch's TCPStore) crashes there."""
    _hook()
    _forks_workers.now = True
    try:
        yield
    finally:
        _forks_workers.now = False


def _hook() -> None:
    if not _hooked.is_set():
        _hooked.set()
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    if getattr(_forks_workers, "now", False):
        gc.freeze()
        _forks_workers.now = False
    for owner in list(_living):
        owner.abandon()
    _living.clear()
