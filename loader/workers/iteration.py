"""What `iter()` of a loader gives: as torch's, it goes on after an exception of the data."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterator
from typing import Any

from cachesvc.core.errors import CacheError, DaemonUnavailable, DeadlineExceeded, SourceUnavailable
from loader.process.fork_hooks import abandon_in_children

_TRANSIENT = (DaemonUnavailable, DeadlineExceeded, SourceUnavailable)
"""What asking once more may mend."""
ENDED = "this iteration has ended with an error: begin another one, after load_state_dict() to continue from a saved state"


class BatchError:
    """Handed on in a batch's place; `again`: the same batch is to be tried again."""

    def __init__(self, error: Exception) -> None:
        self._errors = [error]
        self.retry = isinstance(error, _TRANSIENT)

    def take(self) -> Exception:
        """The error, which nothing here keeps: it would keep its frames, and they this iteration."""
        return self._errors.pop()


class Iteration:
    """Batches of a generator. One that was raised out of a generator itself would have ended it. Threads may share one:
    each batch goes to one of them."""

    def __init__(self, batches: Generator[Any, None, None], length: Callable[[], int]) -> None:
        self._batches, self._length = batches, length
        self._failed = False
        # One that a thread may take twice: who asks from inside (a collate_fn, say) hears so, and does not wait for itself.
        self._lock = threading.RLock()
        abandon_in_children(self)

    def abandon(self) -> None:
        """In a forked child: a thread that stayed with the parent may hold the lock."""
        self._lock = threading.RLock()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __len__(self) -> int:
        """As torch's: how long its loader was when it began, whatever was taken since."""
        return self._length()

    def __next__(self) -> Any:
        with self._lock:
            batch = self._next_batch()
        if not isinstance(batch, BatchError):
            return batch
        error = batch.take()
        try:
            if isinstance(error, StopIteration):  # which would end the iteration, and nobody would hear why
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
        """End it, as a generator's does."""
        self._batches.close()


def is_batch_error(error: Exception, in_process: bool) -> bool:
    """Whether an exception is of a batch, and the next one may be asked for: not one of workers that hang or died, after
    which nobody knows which batch comes. `made_here`: by no worker."""
    said = str(error.args[0]) if error.args else ""  # not `str(error)`: an exception may show something else
    return in_process or isinstance(error, CacheError) or "Caught " in said
