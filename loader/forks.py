"""What a forked child must drop: inherited descriptors keep leases and connections of its parent alive."""

from __future__ import annotations

import os
import threading
import weakref
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


def abandon_in_children(owner: Abandoned) -> None:
    """Have `owner.abandon()` called in every child forked from now on, as long as it lives."""
    _living.add(owner)
    if not _hooked.is_set():
        _hooked.set()
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    for owner in list(_living):
        owner.abandon()
    _living.clear()
