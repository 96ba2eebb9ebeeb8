"""Hooks that run in forked children. They drop inherited descriptors, which would keep the parent's leases and
connections alive, and keep inherited objects whose threads exist in the parent alone."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Abandoned(Protocol):
    """An object with descriptors that a forked child must not keep."""

    def abandon(self) -> None:
        """Close inherited descriptors, in a forked child: take no lock, send nothing."""
        ...


_living: weakref.WeakSet[Abandoned] = weakref.WeakSet()
_hooked = threading.Event()
_forks_workers = threading.local()


def abandon_in_children(owner: Abandoned) -> None:
    """Call `owner.abandon()` in every child that is forked from now on, while `owner` lives."""
    _living.add(owner)
    _hook()


@contextmanager
def forks_workers() -> Iterator[None]:
    """Keep children that this thread forks in this block from collecting inherited garbage: an object that joins its
    threads when it is deleted (torch's TCPStore) crashes there."""
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
