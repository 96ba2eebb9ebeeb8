"""Memory that reads of a process share: in huge pages, used again, and bounded."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LEAST_BYTES = 64 << 10


class Buffers:
    """Buffers that many threads take and return. Together they hold `most_bytes` at most; one alone may be larger."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._returned = threading.Condition()
        self._idle: list[memoryview] = []
        self._held_bytes = 0
        """Bytes of all buffers, idle and in use."""

    @contextmanager
    def borrowed(self, size: int) -> Iterator[memoryview]:
        """A buffer of `size` bytes, as soon as others leave room for it."""
        buffer = self._borrow(size)
        try:
            yield buffer[:size]
        finally:
            with self._returned:
                self._idle.append(buffer)
                self._returned.notify_all()  # they may want buffers of other sizes

    def release(self) -> None:
        """Give the memory of all idle buffers back to the kernel."""
        with self._returned:
            self._drop_idle()

    def _borrow(self, size: int) -> memoryview:
        with self._returned:
            while True:
                fits = [at for at, buffer in enumerate(self._idle) if len(buffer) >= size]
                if fits:
                    return self._idle.pop(min(fits, key=lambda at: len(self._idle[at])))
                rounded = max(_LEAST_BYTES, 1 << (size - 1).bit_length())
                if self._held_bytes + rounded > self._most_bytes:
                    self._drop_idle()
                if self._held_bytes + rounded <= self._most_bytes or not self._held_bytes:
                    self._held_bytes += rounded
                    return _huge(rounded)
                self._returned.wait()

    def _drop_idle(self) -> None:
        self._held_bytes -= sum(map(len, self._idle))
        self._idle.clear()


def _huge(size: int) -> memoryview:
    """Memory in huge pages where the kernel has them: 32 buffers of 8 MiB are 65,536 page faults less."""
    memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel that has none
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(memory)
