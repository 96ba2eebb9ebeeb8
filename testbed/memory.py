"""Memory that is there before a run is timed."""

from __future__ import annotations

import mmap

PAGE_BYTES = 4096
RUN_BYTES = 3 << 30


def settle(size_bytes: int = RUN_BYTES) -> None:
    """Touch as much memory as a run will take, and give it back.

    The host of a virtual machine gives memory at its first touch, which stops a core for some time, and takes
    back what lies free for seconds (free page reporting). 2 GiB took 4.8 s to touch for the first time, 0.1 s
    at once afterwards and 1.3 s after three seconds of rest: what runs second would win.
    """
    with mmap.mmap(-1, size_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory.madvise(mmap.MADV_HUGEPAGE)
        for at in range(0, size_bytes, PAGE_BYTES):
            memory[at] = 1
