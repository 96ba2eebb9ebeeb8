"""The state of memory before a run is timed: provided by the host, or without certain files."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from pathlib import Path

PAGE_BYTES = 4096
RUN_BYTES = 3 << 30


def settle(size_bytes: int = RUN_BYTES) -> None:
    """Touch as much memory as a run will take, and free it again.

    The host of a virtual machine provides memory at its first touch, which stops a core for some time. It takes
    memory back that stays free for seconds (free page reporting). The first touch of 2 GiB took 4.8 s, a second one
    directly afterwards 0.1 s, and one after a pause of three seconds 1.3 s. Without this, the second run would win.
    """
    with mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size_bytes, PAGE_BYTES):
            memory[at] = 1


def drop_page_cache(files: Iterable[Path]) -> None:
    """Drop these files from the page cache."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)  # dirty pages cannot be dropped
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
