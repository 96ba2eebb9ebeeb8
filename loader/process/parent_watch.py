"""Ends a worker at once when its trainer ends, also one that is in the middle of a batch."""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import threading
from collections.abc import Callable

ORPHANED = 1


class EndsWithTrainer:
    """Ties a worker to the trainer that made this: a spawned worker when it unpickles this, a forked one by a call. Pickle
    it before a dataset: opening one may wait for a daemon as long as a read does."""

    def __init__(self) -> None:
        self._trainer, self._inherited = os.getpid(), _temporary_folder()

    def __call__(self) -> None:
        end_with(self._trainer, self._inherited)

    def __reduce__(self) -> tuple[Callable[[int, str | None], None], tuple[int, str | None]]:
        return end_with, (self._trainer, self._inherited)


def end_with(trainer: int, inherited: str | None) -> None:
    """End this process as soon as the trainer has ended, however it ended. `inherited`: the temporary folder that this
    process did not make; a folder of its own is removed."""
    try:
        watched = os.pidfd_open(trainer)
    except ProcessLookupError:
        os._exit(ORPHANED)
    except OSError:  # a kernel before 5.3, or one that forbids it: the end of its requests ends a worker
        return
    threading.Thread(target=_watch, args=(watched, inherited), daemon=True, name="cachesvc-orphan").start()


def _watch(pidfd: int, inherited: str | None) -> None:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll()
    # Without clean-up: no process takes batches any more, and a library's threads could wait for ever.
    own = _temporary_folder()
    if own is not None and own != inherited:
        shutil.rmtree(own, ignore_errors=True)  # it has the sockets that hand tensors over
    os._exit(ORPHANED)


def _temporary_folder() -> str | None:
    """multiprocessing's temporary folder; None where it was not made."""
    config: dict[str, str | None] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config.get("tempdir")
