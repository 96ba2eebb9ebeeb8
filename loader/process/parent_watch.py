"""Ends a worker at once when its trainer ends. torch itself checks every 5 s, and leases and memory stay taken until
then."""

from __future__ import annotations

import multiprocessing
import os
import select
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.utils.data import get_worker_info

from cachesvc.system.group_signals import outlive_group_signals
from loader.process.pickled import sendable_errors

ORPHANED = 1


@dataclass(frozen=True, slots=True)
class EndsWithTrainer:
    """A `worker_init_fn` that ties this worker to its trainer and then runs the user's own. The worker ends with the
    trainer, and not by a signal to both. In the user's own, `get_worker_info()` has the user's dataset, not our wrapper."""

    then: Callable[[int], None] | None

    def __call__(self, worker: int) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None, "only workers have a parent to outlive"
        end_with(parent.pid or 0, _temporary_folder())
        outlive_group_signals()
        info: Any = get_worker_info()
        object.__setattr__(info, "dataset", info.dataset.dataset)  # the object's own __setattr__ raises
        if self.then is not None:
            with sendable_errors():
                self.then(worker)


class EndsWithTrainerOnUnpickle:
    """Ties a spawned worker that unpickles this to the trainer that pickled it. Pickle it before a dataset: opening one may
    wait for a daemon as long as a read does."""

    def __reduce__(self) -> tuple[Callable[[int, str | None], None], tuple[int, str | None]]:
        return end_with, (os.getpid(), _temporary_folder())


def end_with(trainer: int, inherited: str | None) -> None:
    """End this process as soon as the trainer has ended, however it ended. `inherited`: the temporary folder that this
    process did not make; a folder of its own is removed."""
    try:
        watched = os.pidfd_open(trainer)
    except ProcessLookupError:
        os._exit(ORPHANED)
    except OSError:  # a kernel before 5.3, or one that forbids it: torch's own check remains
        return
    threading.Thread(target=_watch, args=(watched, inherited), daemon=True, name="cachesvc-orphan").start()


def _watch(pidfd: int, inherited: str | None) -> None:
    ended = select.poll()
    ended.register(pidfd, select.POLLIN)
    ended.poll()
    # Without clean-up: no process takes batches any more, and torch's queues could wait for a reader for ever.
    own = _temporary_folder()
    if own is not None and own != inherited:
        shutil.rmtree(own, ignore_errors=True)  # it has the sockets that hand tensors over
    os._exit(ORPHANED)


def _temporary_folder() -> str | None:
    """multiprocessing's temporary folder; None where it was not made."""
    config: dict[str, str | None] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    return config.get("tempdir")
