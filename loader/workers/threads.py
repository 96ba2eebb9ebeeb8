"""Worker threads in the trainer's process, so that nothing crosses a pipe.

Reads and gathers release the interpreter lock and run beside the training step. Python code of transforms holds the
lock and takes turns with the step.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np

from cachesvc.core.errors import CacheError, InvalidInput
from loader.batches.turns import BatchKey
from loader.process.pickled import CaughtError
from loader.reading.address_range import Bytes
from loader.workers.iteration import CHILD_SAYS

Make = Callable[[BatchKey], Any]

JOIN_S = 5.0
"""How long the end of an iteration waits for batches in progress, as torch waits for its workers. A thread that
waits longer for its extents ends by itself after its batch."""
GROWTH = 1.125
"""Factor by which a new block exceeds the request, since the next batch of uneven samples may be larger."""
MAX_WASTE = 4
"""A free block more than this many times too large is kept for a larger batch."""


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


class ThreadEngine:
    """Makes turns in order in `workers` threads, at most `ahead` turns from the requested one. Their reads count as
    reads of this process. The threads hold no reference to the engine, so that it can be dropped."""

    def __init__(
        self,
        maker: Callable[[], Make],
        workers: int,
        ahead: int,
        timeout_s: float = 0,
        init: Callable[[int], None] | None = None,
    ) -> None:
        """`maker()` returns each thread's function that makes batches; `init(number)` runs first in each thread.
        `timeout_s`: how long to wait for a batch, 0 for ever, as in torch."""
        self._maker, self._count, self._init = maker, workers, init
        self._ahead, self._timeout_s = ahead, timeout_s
        self._process = os.getpid()
        self._queue: _TurnQueue | None = None
        self._end: Callable[[], object] = lambda: None

    def start(self, epoch: int, first: int, last: int) -> None:
        """Begin to make the turns [first, last) of an epoch."""
        self._end()
        self._process = os.getpid()
        queue = self._queue = _TurnQueue(epoch, first, last, self._ahead)
        threads = [
            threading.Thread(
                target=_make_turns,
                args=(queue, self._maker, self._init, number),
                daemon=True,
                name=f"cachesvc-worker-{number}",
            )
            for number in range(self._count)
        ]
        self._end = weakref.finalize(self, _end_threads, self._process, queue, threads)
        for thread in threads:
            thread.start()

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
        self._end()
        self._queue = None


def _make_turns(
    queue: _TurnQueue, maker: Callable[[], Make], init: Callable[[int], None] | None, number: int
) -> None:
    """Make turns in a thread until the queue ends. `fetch` raises errors again, in the trainer's thread."""
    where, failed = f"in DataLoader worker thread {number}", None
    try:
        make = maker()
        if init is not None:
            init(number)
    except BaseException as error:  # noqa: BLE001
        failed = CaughtError.of(error, where)
    while (turn := queue.take()) is not None:
        try:
            made = failed or make(turn)
        except BaseException as error:  # noqa: BLE001
            made = CaughtError.of(error, where)
        queue.put(turn.turn, made)
        del made


def _end_threads(process: int, queue: _TurnQueue, threads: list[threading.Thread]) -> None:
    if (
        os.getpid() != process
    ):  # a forked child has no threads, and one of them may have held the queue's lock
        return
    queue.end()
    deadline = time.monotonic() + JOIN_S
    for thread in threads:  # after an interrupt a thread may not have been started
        if thread.is_alive() and thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


class BufferPool:
    """Memory for batches that worker threads make; freed blocks are used again. A batch holds its block as long as any view
    of it lives. Thread-safe.

    The C library keeps freed memory per thread: memory that one thread allocates and the trainer frees returns to that
    thread, and each thread keeps tens of megabytes. Two threads with batches of 32 x 110 KB took 379 MB without the
    pool and take 191 MB with it.
    """

    def __init__(self, max_free: int) -> None:
        """Keep at most `max_free` free blocks."""
        self._max_free = max_free
        self._free: list[memoryview] = []
        self._released: deque[memoryview] = deque()
        self._lock = threading.Lock()

    def empty(self, size_bytes: int) -> Bytes:
        """Return uninitialised bytes for one batch."""
        block = self._pop_free(size_bytes) or np.empty(int(size_bytes * GROWTH) + 1, np.uint8).data
        # frombuffer over a memoryview: every view made of the result keeps this array alive, not the block's own
        # array.
        found: Bytes = np.frombuffer(block, np.uint8, size_bytes)
        # The finalizer may run at any time, even while this thread holds the lock, so it takes no lock.
        weakref.finalize(found, self._released.append, block).atexit = False
        return found

    def _pop_free(self, size_bytes: int) -> memoryview | None:
        """Take the smallest free block that is large enough."""
        with self._lock:
            while self._released:
                insort(self._free, self._released.popleft(), key=len)
            del self._free[: max(0, len(self._free) - self._max_free)]
            at = bisect_left(self._free, size_bytes, key=len)
            if at == len(self._free) or len(self._free[at]) > MAX_WASTE * max(1, size_bytes):
                return None
            return self._free.pop(at)
