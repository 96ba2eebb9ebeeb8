"""The file that an extent is filled into: a memfd is mapped and received into, any other file is written from buffers."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from cachesvc.core.errors import CacheError, OutOfSpace, TierFailed
from cachesvc.core.model import HUGE_BYTES
from cachesvc.system import mapping
from cachesvc.system.buffers import Buffers
from cachesvc.system.huge_pages import is_memfd, use_huge_pages

PASS_BYTES = 1 << 20
"""A range is stored, and passed on to peers, this many bytes at a time while the rest of it arrives. Over a slow link the
ranges of an extent arrive side by side, and all of them end last. A multiple of the blocks that have digests."""
CACHED_BYTES = 256 << 10
"""Bytes that stay in the processor's cache from when they are received until they are digested."""
_DONTFORK, _POPULATE_WRITE = 10, 23
"""Linux's MADV_DONTFORK, and MADV_POPULATE_WRITE (5.14): make pages present for writing, or return an error."""
OnBytes = Callable[[int, memoryview], None]


def ignore_bytes(at: int, data: memoryview) -> None:
    """Do nothing; the default of `Fetcher.fetch`."""


class FillTarget:
    """Made by `open_target`. `passing` sees all bytes once they are stored: peers may then be sent the blocks that it marks
    as complete. Thread-safe."""

    def __init__(self, fd: int, buffers: Buffers, passing: OnBytes, memory: _Mapped | None) -> None:
        self._fd, self._buffers, self._passing, self._memory = fd, buffers, passing, memory

    def room(self, at: int, size_bytes: int) -> AbstractContextManager[memoryview]:
        """Lend memory to receive the extent's bytes from offset `at` into. Call `store` before it is returned.

        Bytes that are received and not stored may lie in the extent afterwards. Raises OutOfSpace, TierFailed.
        """
        if self._memory is None:
            return self._buffers.borrowed(size_bytes)
        return self._memory.room(at, size_bytes)

    def store(self, received: memoryview, at: int) -> None:
        """Write the bytes received into a `room`, or a part of it, to offset `at`. Raises OutOfSpace, TierFailed."""
        if self._memory is None:
            self._write(received, at)
        self._passing(at, received)

    def write(self, data: memoryview, at: int) -> None:
        """Write bytes of other memory to offset `at`. Raises OutOfSpace, TierFailed."""
        self._write(data, at)
        self._passing(at, data)

    def _write(self, data: memoryview, at: int) -> None:
        try:
            while len(data):
                done = os.pwrite(self._fd, data, at)
                data, at = data[done:], at + done
        except OSError as error:
            raise _translated(error) from error

    def read(self, data: memoryview, at: int) -> None:
        """Fill all of `data` with the bytes stored at offset `at`. Raises TierFailed."""
        try:
            while len(data):
                done = os.preadv(self._fd, [data], at)
                if not done:
                    raise TierFailed("the extent being filled ends before what was written to it")
                data, at = data[done:], at + done
        except OSError as error:
            raise TierFailed(f"cannot read the extent being filled: {error.strerror}") from error


@contextmanager
def open_target(
    fd: int, size_bytes: int, buffers: Buffers, passing: OnBytes = ignore_bytes
) -> Iterator[FillTarget]:
    """Yield the target of a fill of `size_bytes` into `fd`. A memfd gets huge pages. No mapping is left behind, since a
    writable one would keep it from being sealed. Raises TierFailed, OutOfSpace."""
    if not size_bytes or not is_memfd(fd):
        yield FillTarget(fd, buffers, passing, None)
        return
    try:
        use_huge_pages(fd, size_bytes)
        memory = _Mapped(fd, size_bytes)
    except OSError as error:
        raise _translated(error) from error
    try:
        yield FillTarget(fd, buffers, passing, memory)
    finally:
        memory.close()


class _Mapped:
    """A writable mapping of a whole memfd. Child processes do not inherit it.

    It begins at a multiple of a huge page, so that the kernel maps the memfd's huge pages as such; page by page it takes
    0.2 s for 1 GiB.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._reserved_bytes = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
        self._start = mapping.reserve(self._reserved_bytes, HUGE_BYTES)
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mapping.MAP_FIXED
        try:
            mapping.place(self._start, size_bytes, protection, flags, fd)
            mapping.advise(self._start, size_bytes, _DONTFORK)
        except OSError:
            mapping.remove(self._start, self._reserved_bytes)
            raise
        memory = (ctypes.c_ubyte * size_bytes).from_address(self._start)
        self._view = memoryview(memory).cast("B")

    @contextmanager
    def room(self, at: int, size_bytes: int) -> Iterator[memoryview]:
        """Make the pages present first. Where memory is short that is an error, and a page fault would be SIGBUS."""
        begin = at // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            mapping.advise(self._start + begin, at + size_bytes - begin, _POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # an older kernel; there recv returns EFAULT, except over TLS
                raise _translated(error) from error
        with self._view[at : at + size_bytes] as view:
            yield view

    def close(self) -> None:
        """Unmap the memory. No `room` may be in use."""
        self._view.release()
        mapping.remove(self._start, self._reserved_bytes)


def _translated(error: OSError) -> CacheError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return OutOfSpace("no space left for the extent; lower the budget")
    if error.errno in (errno.ENOMEM, errno.EFAULT):
        return OutOfSpace("no memory left for the extent; lower the budget")
    return TierFailed(f"cannot write the extent being filled: {error.strerror}")


class RangeWriter:
    """Stores a range that arrives in `view` at offset `at` of a target, whole steps of `PASS_BYTES` at once."""

    def __init__(self, into: FillTarget, at: int, view: memoryview) -> None:
        self._into, self._at, self._view = into, at, view
        self._stored = 0

    def received(self, count: int) -> None:
        """Store what has come of the first `count` bytes; 0 begins the range again. Raises as `FillTarget.store`."""
        if not count:
            self._stored = 0
        end = count - (self._at + count) % PASS_BYTES
        if end > self._stored:
            self._store(end)

    def finish(self) -> None:
        """Store the rest. Raises as `FillTarget.store`."""
        self._store(len(self._view))

    def _store(self, end: int) -> None:
        self._into.store(self._view[self._stored : end], self._at + self._stored)
        self._stored = end
