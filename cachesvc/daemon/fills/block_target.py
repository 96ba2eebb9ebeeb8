"""The target of received blocks: written into a mapping of a memfd, or through one buffer into a file."""

from __future__ import annotations

import ctypes
import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.model import HUGE_BYTES
from cachesvc.sources.fill_target import FillTarget, ignore_bytes
from cachesvc.system import mapping
from cachesvc.tiers.huge_pages import is_memfd
from cachesvc.tiers.os_errors import translated

PART_BYTES = 256 << 10
"""Bytes that are received, compared and marked at a time; they stay in the processor's cache meanwhile."""
_POPULATE_WRITE = 23
"""Linux's MADV_POPULATE_WRITE (5.14): make pages present for writing, or return an error."""


class BlockTarget(Protocol):
    """Memory to receive into, and the way from there to the extent."""

    def room(self, at: int, size_bytes: int) -> memoryview:
        """Return memory for `size_bytes`, at most `PART_BYTES`, of the extent from offset `at`. The caller releases it."""
        ...

    def store(self, data: memoryview, at: int) -> None:
        """Write what was received into `room`. Raises OutOfSpace, TierFailed."""
        ...


class _Mapped:
    """A memfd is received into directly. Unverified bytes may lie in it, in blocks that are not marked as complete.

    The mapping begins at a multiple of a huge page, so that the kernel maps the memfd's huge pages as such; page by page it
    takes 0.2 s for 1 GiB.
    """

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._reserved_bytes = -(-size_bytes // HUGE_BYTES) * HUGE_BYTES
        self._start = mapping.reserve(self._reserved_bytes, HUGE_BYTES)
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | mapping.MAP_FIXED
        try:
            mapping.place(self._start, size_bytes, protection, flags, fd)
        except OSError:
            mapping.remove(self._start, self._reserved_bytes)
            raise
        memory = (ctypes.c_ubyte * size_bytes).from_address(self._start)
        self._view = memoryview(memory).cast("B")

    def room(self, at: int, size_bytes: int) -> memoryview:
        """Make the pages present first. Where memory is short that is an error, and a page fault would be SIGBUS."""
        begin = at // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            mapping.advise(self._start + begin, at + size_bytes - begin, _POPULATE_WRITE)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.EFAULT):
                raise OutOfSpace("no memory left for the extent; lower the budget") from error
            if error.errno != errno.EINVAL:  # an older kernel; there recv returns EFAULT, except over TLS
                raise TierFailed(f"cannot write the extent being filled: {error.strerror}") from error
        return self._view[at : at + size_bytes]

    def store(self, data: memoryview, at: int) -> None:
        """Do nothing: the bytes are there."""

    def close(self) -> None:
        """Unmap the memory. No `room` may be in use."""
        self._view.release()
        mapping.remove(self._start, self._reserved_bytes)


class _Buffered:
    """A file is written with `pwrite`, since a disk error in a mapping would be SIGBUS."""

    def __init__(self, fd: int) -> None:
        self._into = FillTarget(fd, ignore_bytes)
        self._buffer = memoryview(bytearray(PART_BYTES))

    def room(self, at: int, size_bytes: int) -> memoryview:
        return self._buffer[:size_bytes]

    def store(self, data: memoryview, at: int) -> None:
        self._into.write(data, at)


@contextmanager
def open_target(fd: int, size_bytes: int) -> Iterator[BlockTarget]:
    """Yield the target of an extent that is to be filled into `fd`. No mapping is left behind, since a writable one would
    keep the memfd from being sealed. Raises TierFailed, OutOfSpace."""
    if not size_bytes or not is_memfd(fd):
        yield _Buffered(fd)
        return
    with translated("RAM", "map the extent being filled"):
        mapped = _Mapped(fd, size_bytes)
    try:
        yield mapped
    finally:
        mapped.close()
