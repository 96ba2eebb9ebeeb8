"""Where received blocks go: into a mapping of a memfd, or through one buffer into a file."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.sources.fetch import FillTarget
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
    """A memfd is received into directly. Unverified bytes may lie in it, in blocks that are not marked as complete."""

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory

    def room(self, at: int, size_bytes: int) -> memoryview:
        """Make the pages present first. Where memory is short that is an error, and a page fault would be SIGBUS."""
        begin = at // mmap.PAGESIZE * mmap.PAGESIZE
        try:
            self._memory.madvise(_POPULATE_WRITE, begin, at + size_bytes - begin)
        except OSError as error:
            if (
                error.errno == errno.EINVAL
            ):  # an older kernel; recv itself returns an error then, except over TLS
                pass
            elif error.errno in (errno.ENOMEM, errno.EFAULT):
                raise OutOfSpace("no memory left for the extent; lower the budget") from error
            else:
                raise TierFailed(f"cannot write the extent being filled: {error.strerror}") from error
        with memoryview(self._memory) as view:
            return view[at : at + size_bytes]

    def store(self, data: memoryview, at: int) -> None:
        """Do nothing: the bytes are there."""


class _Buffered:
    """A file is written with `pwrite`, since a disk error in a mapping would be SIGBUS."""

    def __init__(self, fd: int) -> None:
        self._into = FillTarget(fd, lambda at, data: None)
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
        memory = mmap.mmap(fd, size_bytes)
    try:
        yield _Mapped(memory)
    finally:
        memory.close()
