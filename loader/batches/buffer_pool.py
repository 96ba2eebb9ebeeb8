"""Memory for batches that threads make, used again when a batch has died.

The C library keeps freed memory for each thread apart: what a thread allocates and the trainer frees comes back to
that thread, and each keeps tens of megabytes. Measured with two threads and batches of 32 x 110 KB: 379 MB, now 191.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_left, insort
from collections import deque

import numpy as np

from loader.reading.address_range import Bytes

GROWTH = 1.125
"""A new block is larger than was asked for: the next batch of uneven samples may be."""
MAX_WASTE = 4
"""A block that is so many times too large waits for a batch that needs it."""


class BufferPool:
    """Blocks of memory. A batch holds its block as long as any view of it lives. Safe to share between threads."""

    def __init__(self, max_free: int) -> None:
        """Keeps at most `spare` blocks that nobody uses."""
        self._max_free = max_free
        self._free: list[memoryview] = []
        self._released: deque[memoryview] = deque()
        self._lock = threading.Lock()

    def empty(self, size_bytes: int) -> Bytes:
        """Bytes that hold anything, for one batch."""
        block = self._pop_free(size_bytes) or np.empty(int(size_bytes * GROWTH) + 1, np.uint8).data
        # Its base is no array, so whatever is made of it keeps this very array alive.
        found: Bytes = np.frombuffer(block, np.uint8, size_bytes)
        # Called at any moment, also under our lock: it takes none.
        weakref.finalize(found, self._released.append, block).atexit = False
        return found

    def _pop_free(self, size_bytes: int) -> memoryview | None:
        """The smallest block that is large enough."""
        with self._lock:
            while self._released:
                insort(self._free, self._released.popleft(), key=len)
            del self._free[: max(0, len(self._free) - self._max_free)]
            at = bisect_left(self._free, size_bytes, key=len)
            if at == len(self._free) or len(self._free[at]) > MAX_WASTE * max(1, size_bytes):
                return None
            return self._free.pop(at)
