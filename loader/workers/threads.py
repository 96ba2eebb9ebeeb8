"""Workers as threads of the trainer's process: nothing crosses a pipe. Reads and gathers release the interpreter
lock, so batches are made beside the training step; Python code of transforms does not, it takes turns with it.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from torch._utils import ExceptionWrapper

from cachesvc.core.errors import CacheError, InvalidInput
from loader.batches.feed import BatchKey
from loader.process.fork_hooks import CHILD_SAYS

Make = Callable[[BatchKey], Any]

JOIN_S = 5.0
"""How long an abandoned iteration waits for the batches in the making, as torch waits for its workers. A thread
that waits longer for its extents ends by itself after that batch."""


class _TurnQueue:
    """The turns of one iteration: threads take them in order, at most `ahead` before the one asked for."""

    def __init__(self, epoch: int, first: int, last: int, ahead: int) -> None:
        self._epoch, self._taken, self._last, self._ahead = epoch, first, last, ahead
        self._requested = first
        self._batches: dict[int, Any] = {}
        # Locked by itself: a `with` on a Condition runs Python code, in which an interrupt would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ended = False

    def take(self) -> BatchKey | None:
        """The next turn to make, when its time has come; None when the line has ended."""
        with self._lock:
            self._changed.wait_for(lambda: self._ended or self._taken < self._requested + self._ahead)
            if self._ended or self._taken >= self._last:
                return None
            self._taken += 1
            return BatchKey(self._epoch, self._taken - 1)

    def put(self, turn: int, batch: Any) -> None:
        """A turn's batch, or what was raised instead."""
        with self._lock:
            if not self._ended:
                self._batches[turn] = batch
                self._changed.notify_all()

    def fetch(self, turn: int, timeout_s: float | None) -> Any:
        """The batch of a turn; those before it are dropped. Raises TimeoutError."""
        with self._lock:
            for skipped in [made for made in self._batches if made < turn]:
                del self._batches[skipped]
            self._requested, self._taken = turn, max(turn, self._taken)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._ended or turn in self._batches, timeout_s):
                raise TimeoutError
            if self._ended:
                raise CacheError(f"batch {turn} was requested from an iteration that has ended")
            self._requested = turn + 1
            self._changed.notify_all()
            return self._batches.pop(turn)

    def end(self) -> None:
        """Nobody asks any more."""
        with self._lock:
            self._ended = True
            self._batches.clear()
            self._changed.notify_all()


class _ThreadPool:
    """The threads, and the line that they work on. They know nothing of the engine, so that it can be dropped."""

    def __init__(
        self,
        maker: Callable[[], Make],
        count: int,
        persistent: bool,
        init: Callable[[int], None] | None,
    ) -> None:
        self._maker, self._count, self._persistent, self._init = maker, count, persistent, init
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        self._lock = threading.RLock()
        self._queue_changed = threading.Condition(self._lock)
        self._queue: _TurnQueue | None = None
        self._closed = False

    def run(self, queue: _TurnQueue) -> None:
        """Begin a line; the one before has ended."""
        with self._lock:
            self._queue = queue
            self._queue_changed.notify_all()
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        if not self._threads:
            self._threads = [
                threading.Thread(target=self._run_thread, args=(n,), daemon=True, name=f"cachesvc-worker-{n}")
                for n in range(self._count)
            ]
            for thread in self._threads:
                thread.start()

    def stop(self) -> None:
        """End the line, and the threads with it unless they persist."""
        with self._lock:
            if self._queue is not None:
                self._queue.end()
                self._queue = None
            self._queue_changed.notify_all()
        if not self._persistent:
            self._join()

    def close(self) -> None:
        """End the line and the threads; in a forked child there are none."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
        self.stop()
        self._join()

    def _join(self) -> None:
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:  # an interrupt may have come before one was started
            if thread.is_alive() and thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))
        self._threads = []

    def _run_thread(self, number: int) -> None:
        make = self._maker()
        failed = self._run_init(number)
        done: _TurnQueue | None = None
        while (queue := self._next_queue(done)) is not None:
            while (turn := queue.take()) is not None:
                queue.put(turn.turn, failed or _make_or_wrap(make, turn, number))
            done = queue
            if not self._persistent:
                return

    def _next_queue(self, done: _TurnQueue | None) -> _TurnQueue | None:
        """The line after `done`, waited for; None when there will be none."""
        with self._lock:
            self._queue_changed.wait_for(
                lambda: (
                    self._closed
                    or (self._queue is not None and self._queue is not done)
                    or (self._queue is None and not self._persistent)
                )
            )
            return None if self._closed else self._queue

    def _run_init(self, number: int) -> ExceptionWrapper | None:
        try:
            if self._init is not None:
                self._init(number)
        except BaseException:  # noqa: BLE001  raised again by `fetch`, in the trainer's thread
            return ExceptionWrapper(where=f"in DataLoader worker thread {number}")
        return None


def _make_or_wrap(make: Make, turn: BatchKey, number: int) -> Any:
    try:
        return make(turn)
    except BaseException:  # noqa: BLE001  raised again by `fetch`, in the trainer's thread
        return ExceptionWrapper(where=f"in DataLoader worker thread {number}")


class ThreadEngine:
    """Fetches turns in order; `workers` threads make at most `ahead` from the one that is asked for. What they
    read is counted with what this process reads."""

    def __init__(
        self,
        maker: Callable[[], Make],
        workers: int,
        ahead: int,
        timeout_s: float = 0,
        persistent: bool = False,
        init: Callable[[int], None] | None = None,
    ) -> None:
        """`maker()` gives each thread what makes its batches; `init(number)` runs first in each. `timeout_s`: how
        long a batch is waited for, 0 for ever, as in torch."""
        self._new_pool: Callable[[], _ThreadPool] = lambda: _ThreadPool(maker, workers, persistent, init)
        self._ahead, self._timeout_s = ahead, timeout_s
        self._queue: _TurnQueue | None = None
        self._reset()

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to fetch the turns [first, last) of an epoch."""
        if self._process != os.getpid():
            self._reset()
        self._pool.stop()
        self._queue = _TurnQueue(epoch, first, last, self._ahead)
        self._pool.run(self._queue)

    def fetch(self, key: tuple[int, int]) -> Any:
        """The batch of a turn. Raises what making it raised, as torch does it; RuntimeError after the timeout."""
        if self._process != os.getpid():
            raise InvalidInput(CHILD_SAYS)
        assert self._queue is not None, "start comes first"
        try:
            batch = self._queue.fetch(key[1], self._timeout_s or None)
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds") from None
        if isinstance(batch, ExceptionWrapper):
            batch.reraise()
        return batch

    def stop(self) -> None:
        """The iteration has ended, or was abandoned."""
        # a forked child has no threads, and perhaps locks that one of them held
        if self._process == os.getpid():
            self._queue = None
            self._pool.stop()

    def _reset(self) -> None:
        self._process, self._pool, self._queue = os.getpid(), self._new_pool(), None
        weakref.finalize(self, self._pool.close)
