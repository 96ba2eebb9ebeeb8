"""Worker threads in the trainer's process, so that nothing crosses a pipe.

Reads and gathers release the interpreter lock and run beside the training step. Python code of transforms holds the
lock and takes turns with the step.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

from cachesvc.core.errors import CacheError, InvalidInput
from loader.batches.turns import BatchKey
from loader.process.pickled import CaughtError
from loader.workers.iteration import CHILD_SAYS

Make = Callable[[BatchKey], Any]

JOIN_S = 5.0
"""How long the end of an iteration waits for batches in progress, as torch waits for its workers. A thread that
waits longer for its extents ends by itself after its batch."""


class _TurnQueue:
    """The turns of one iteration. Threads take them in order, at most `ahead` turns from the requested one."""

    def __init__(self, epoch: int, first: int, last: int, ahead: int) -> None:
        self._epoch, self._taken, self._last, self._ahead = epoch, first, last, ahead
        self._requested = first
        self._batches: dict[int, Any] = {}
        # The lock is taken by itself: entering a Condition runs Python code, where an interrupt would leave the
        # lock taken.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ended = False

    def take(self) -> BatchKey | None:
        """Return the next turn as soon as it may be made; None when the queue has ended."""
        with self._lock:
            self._changed.wait_for(lambda: self._ended or self._taken < self._requested + self._ahead)
            if self._ended or self._taken >= self._last:
                return None
            self._taken += 1
            return BatchKey(self._epoch, self._taken - 1)

    def put(self, turn: int, batch: Any) -> None:
        """Store a turn's batch, or the error of making it."""
        with self._lock:
            if not self._ended:
                self._batches[turn] = batch
                self._changed.notify_all()

    def fetch(self, turn: int, timeout_s: float | None) -> Any:
        """Return the batch of a turn, and drop those before it. Raises TimeoutError."""
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
        """End the queue: no turn is requested any more."""
        with self._lock:
            self._ended = True
            self._batches.clear()
            self._changed.notify_all()


class _ThreadPool:
    """The threads and the queue they work on. They hold no reference to the engine, so that it can be dropped."""

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
        """Begin a queue, after the previous one has ended."""
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
        """End the queue, and the threads unless they persist."""
        with self._lock:
            if self._queue is not None:
                self._queue.end()
                self._queue = None
            self._queue_changed.notify_all()
        if not self._persistent:
            self._join()

    def close(self) -> None:
        """End the queue and the threads. A forked child has none."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._closed = True
        self.stop()
        self._join()

    def _join(self) -> None:
        deadline = time.monotonic() + JOIN_S
        for thread in self._threads:  # after an interrupt a thread may not have been started
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
        """Wait for the queue after `done`; None if there will be none."""
        with self._lock:
            self._queue_changed.wait_for(
                lambda: (
                    self._closed
                    or (self._queue is not None and self._queue is not done)
                    or (self._queue is None and not self._persistent)
                )
            )
            return None if self._closed else self._queue

    def _run_init(self, number: int) -> CaughtError | None:
        try:
            if self._init is not None:
                self._init(number)
        except BaseException as error:  # noqa: BLE001  raised again by `fetch`, in the trainer's thread
            return CaughtError.of(error, f"in DataLoader worker thread {number}")
        return None


def _make_or_wrap(make: Make, turn: BatchKey, number: int) -> Any:
    try:
        return make(turn)
    except BaseException as error:  # noqa: BLE001  raised again by `fetch`, in the trainer's thread
        return CaughtError.of(error, f"in DataLoader worker thread {number}")


class ThreadEngine:
    """Makes turns in order in `workers` threads, at most `ahead` turns from the requested one. Their reads count as
    reads of this process."""

    def __init__(
        self,
        maker: Callable[[], Make],
        workers: int,
        ahead: int,
        timeout_s: float = 0,
        persistent: bool = False,
        init: Callable[[int], None] | None = None,
    ) -> None:
        """`maker()` returns each thread's function that makes batches; `init(number)` runs first in each thread.
        `timeout_s`: how long to wait for a batch, 0 for ever, as in torch."""
        self._new_pool: Callable[[], _ThreadPool] = lambda: _ThreadPool(maker, workers, persistent, init)
        self._ahead, self._timeout_s = ahead, timeout_s
        self._queue: _TurnQueue | None = None
        self._reset()

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to make the turns [first, last) of an epoch."""
        if self._process != os.getpid():
            self._reset()
        self._pool.stop()
        self._queue = _TurnQueue(epoch, first, last, self._ahead)
        self._pool.run(self._queue)

    def fetch(self, key: tuple[int, int]) -> Any:
        """Return the batch of a turn. Raises the error of making it, as torch does, and RuntimeError after the
        timeout."""
        if self._process != os.getpid():
            raise InvalidInput(CHILD_SAYS)
        assert self._queue is not None, "start comes first"
        try:
            batch = self._queue.fetch(key[1], self._timeout_s or None)
        except TimeoutError:
            raise RuntimeError(f"DataLoader timed out after {self._timeout_s} seconds") from None
        if isinstance(batch, CaughtError):
            raise batch.to_raise()
        if isinstance(batch, Exception):  # of worker processes, from which `make` takes batches
            raise batch
        return batch

    def stop(self) -> None:
        """End the iteration, complete or not."""
        # a forked child has no threads, and a thread of the parent may have held the locks
        if self._process == os.getpid():
            self._queue = None
            self._pool.stop()

    def _reset(self) -> None:
        self._process, self._pool, self._queue = os.getpid(), self._new_pool(), None
        weakref.finalize(self, self._pool.close)
