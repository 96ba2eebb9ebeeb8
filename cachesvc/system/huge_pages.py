"""Huge pages for extents in RAM, whatever the host's setting for shared memory (its default: never).

MADV_COLLAPSE (madvise(2), Linux 6.1) turns 2 MiB of a memfd into one page without privileges. It is cheap while the memfd
is empty: one small page in each 2 MiB marks the place, and the kernel clears the rest at once. Measured for 64 MiB: 4 ms,
then 6 ms to write them instead of 28 ms. Readers map 512 small pages at a time and gather 3 KB records 1.3 times as fast.
An older kernel, or one without free 2 MiB, leaves small pages.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from contextlib import suppress

from cachesvc.core.model import HUGE_BYTES
from cachesvc.system import mapping

SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""What every memfd of an extent has: no access to a mapping of it lies beyond its end."""
_MADV_COLLAPSE = 25
_OVER = mmap.MAP_SHARED | mapping.MAP_FIXED


def is_memfd(fd: int) -> bool:
    """Tell by the seals of its size whether a descriptor to fill is a memfd of an extent."""
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SIZE_SEALS == SIZE_SEALS
    except OSError:  # a file on a disk cannot be sealed
        return False


def use_huge_pages(fd: int, size_bytes: int) -> None:
    """Back every whole 2 MiB of a memfd with one huge page, as far as the kernel has them. Leave a memfd that is not empty
    as it is: the marks would overwrite its bytes."""
    whole = size_bytes // HUGE_BYTES * HUGE_BYTES
    if not whole or os.fstat(fd).st_blocks:
        return
    with suppress(OSError):  # small pages remain
        for at in range(0, whole, HUGE_BYTES):
            os.pwrite(fd, b"\0", at)
        start = mapping.reserve(whole, HUGE_BYTES)
        try:
            mapping.place(start, whole, mmap.PROT_READ, _OVER, fd)
            mapping.advise(start, whole, _MADV_COLLAPSE)
        finally:
            mapping.remove(start, whole)
