"""How much memory the daemon and its processes take at their peak, and the RAM budget that this leaves.

`tests/system/test_footprint.py` measures the figures (docs/decisions/2026-11-26-memory-of-our-processes.md).
"""

from __future__ import annotations

import os

from cachesvc.system.memory import MEMORY_SPARE, allowed_bytes

DAEMON_BYTES = 112 << 20
"""The daemon, the process that fillers are forked from, and the builder, with their sockets and page tables."""
FILLER_BYTES = 28 << 20
"""A filler, without the memory of the fills that it works at."""
SHARER_BYTES = 48 << 20
"""The process that gives peers what this node holds."""
FILLS = 2
"""Extents that a filler works at side by side: they hide each other's first and last round trips. More make the first one
late, unless they are small: as many more as together hold no more bytes than these would (core/tiering/policy.py)."""
WORK_EXTENTS = 4
"""The RAM tier leaves memory for so many fills, or for as many as there are at once. A fill that takes more waits until the
RAM tier has given up as much."""
FEW_BYTES = 512 << 20
"""Memory for each filler, where there is little."""


def default_fillers() -> int:
    """One interpreter fills about 1 GB/s, and four saturate a 25 Gbit/s network card; fewer where memory is short."""
    by_cores = min(4, max(2, (os.cpu_count() or 1) // 2))
    return min(by_cores, max(1, allowed_bytes() // FEW_BYTES))


def work_bytes(fillers: int, extent_bytes: int) -> int:
    """Memory that the RAM tier always leaves to fills."""
    return min(WORK_EXTENTS, fillers * FILLS) * extent_bytes


def footprint_bytes(fillers: int, extent_bytes: int, shares: bool = False) -> int:
    """Memory of our own processes at their peak, beside the RAM tier. `shares`: peers are given what is here."""
    processes_bytes = DAEMON_BYTES + fillers * FILLER_BYTES + shares * SHARER_BYTES
    return processes_bytes + work_bytes(fillers, extent_bytes)


def largest_ram_bytes(allowed: int, own_bytes: int) -> int:
    """The largest RAM budget with which nothing is killed for memory, where cgroups and machine let us use `allowed`
    bytes and our processes take `own_bytes` of them."""
    return max(0, allowed - int(allowed * MEMORY_SPARE) - own_bytes)


def default_ram_bytes(allowed: int, own_bytes: int) -> int:
    """10 % of what cgroups and machine allow, and no more than the largest budget."""
    return min(allowed // 10, largest_ram_bytes(allowed, own_bytes))
