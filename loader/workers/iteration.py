"""The iterator that `iter()` of a loader returns. As in torch, it continues after an exception from the data."""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

from cachesvc.core.errors import CacheError, DaemonUnavailable, DeadlineExceeded, SourceUnavailable
from cachesvc.system.fork_hooks import abandon_in_children

_TRANSIENT = (DaemonUnavailable, DeadlineExceeded, SourceUnavailable)
"""Errors after which the same batch is tried again."""
CHILD_SAYS = (
    "this iteration of the DataLoader began in the process that forked this one, and its workers serve that process; "
    "begin one of its own here"
)
ENDED = "this iteration has ended with an error: begin another one, after load_state_dict() to continue from a saved state"

READ_AHEAD = (
    "Ray's wrapper takes each batch before its use, so a state saved in mid-epoch counts one batch too many: write "
    "prepare_data_loader(..., move_to_device=False), and device= of this DataLoader to move batches"
)


class BatchError:
    """An error in place of a batch. `retry`: the same batch will be tried again."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]
        self.retry = isinstance(error, _TRANSIENT)

    def take(self) -> Exception:
        """Return the error and drop the reference to it, which would keep its frames and through them the
        iteration."""
        return self._errors.pop()


class Iteration:
    """Batches of a generator. An error arrives as a BatchError and is raised here, since raising it in the
    generator would end the generator. Threads may share an iteration: each batch goes to one of them."""

    def __init__(self, batches: Generator[Any, None, None], length: Callable[[], int]) -> None:
        self._batches, self._length = batches, length
        self._failed = False
        # Reentrant: a collate_fn that calls `next` gets an error from the generator instead of a deadlock.
        self._lock = threading.RLock()
        abandon_in_children(self)
        _warn_of_ray()

    def abandon(self) -> None:
        """Replace the lock in a forked child: a thread of the parent may have held it."""
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """The length of the loader when the iteration began, as in torch."""
        return self._length()

    def __next__(self) -> Any:
        with self._lock:
            batch = self._next_batch()
        if not isinstance(batch, BatchError):
            return batch
        error = batch.take()
        try:
            if isinstance(error, StopIteration):  # it would end the iteration silently
                raise RuntimeError(
                    "making a batch (a collate_fn, for example) raised StopIteration"
                ) from error
            raise error
        finally:
            del error, self

    def _next_batch(self) -> Any:
        if self._failed:
            raise CacheError(ENDED)
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except BaseException:
            self._failed = True
            raise

    def close(self) -> None:
        """End the iteration, as a generator's `close` does."""
        self._batches.close()


def is_batch_error(error: Exception, in_process: bool) -> bool:
    """Return whether an error belongs to one batch, so that the next batch can be requested. After a worker hangs
    or dies it is unknown which batch comes next. `in_process`: no worker made the batch."""
    text = str(error.args[0]) if error.args else ""  # not `str(error)`, which an exception class may override
    return in_process or isinstance(error, CacheError) or "Caught " in text


def _warn_of_ray() -> None:
    """Warn if the loader's `iter()` is called by Ray's wrapper, once for each place in the user's program: a wrapper
    reads a batch ahead, and nothing else tells a loader that it has one."""
    caller = sys._getframe(3)  # this function, Iteration() and the loader's __iter__ lie between
    if caller.f_globals.get("__name__", "").startswith("ray.train."):
        warnings.warn(READ_AHEAD, stacklevel=5)
