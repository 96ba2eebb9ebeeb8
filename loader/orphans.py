"""A worker ends with its trainer: torch's own look every 5 s, and until then leases and memory stay taken."""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.util import get_temp_dir

ORPHANED = 1


@dataclass(frozen=True, slots=True)
class EndsWithTrainer:
    """A `worker_init_fn`: ties this worker to its trainer, then runs the user's own."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        end_with_parent()
        if self.then is not None:
            self.then(worker)


def end_with_parent() -> None:
    """End this process as soon as the one that made it is gone, however that ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "only workers have a parent to outlive"
    try:
        watched = os.pidfd_open(parent.pid or 0)
    except ProcessLookupError:
        _end()
    except OSError:  # a kernel before 5.3, or one that forbids it: torch's look remains
        return
    threading.Thread(target=_watch, args=(watched,), daemon=True, name="cachesvc-orphan").start()


def _watch(pidfd: int) -> None:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll()
    _end()


def _end() -> None:
    """At once: nobody is left to take batches, and torch's queues could wait for a reader for ever."""
    shutil.rmtree(get_temp_dir(), ignore_errors=True)  # sockets that hand tensors over
    os._exit(ORPHANED)
