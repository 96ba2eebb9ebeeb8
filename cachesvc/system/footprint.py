"""Peak memory of the daemon and its processes, and the RAM budget that it leaves.

The figures are measured (docs/decisions/2026-11-26-memory-of-our-processes.md); `tests/system/test_footprint.py`
measures them again.
"""

from __future__ import annotations

import os

from cachesvc.system.memory import MEMORY_SPARE, allowed_bytes

DAEMON_BYTES = 124 << 20
"""The parent, the daemon, the fork server and the builder, with their sockets and page tables."""
FILLER_BYTES = 28 << 20
"""A filler, without the memory of its fills."""
AGENT_BYTES = 48 << 20
"""The peer agent."""
FILLS = 2
"""Concurrent fills of a filler, which hide each other's first and last round trips. More would delay the first one, unless
the extents are small (`fill_bytes` in core/tiering/policy.py)."""
WORK_EXTENTS = 4
"""The RAM tier leaves memory for this many extents, or for one for each concurrent fill if that is less. A fill that
needs more waits until the RAM tier has shrunk."""
FEW_BYTES = 512 << 20
"""Memory for each filler on a small machine; fewer fillers start where it allows less."""


def default_fillers() -> int:
    """The default number of fillers: a quarter of the cores, 2 to 16. One filler takes 1 GB/s from S3 on a core of its
    own, so 16 take as much as a network card of 100 Gbit/s carries."""
    by_cores = min(16, max(2, (os.cpu_count() or 1) // 4))
    return min(by_cores, max(1, allowed_bytes() // FEW_BYTES))


def work_bytes(fillers: int, extent_bytes: int) -> int:
    """The bytes that the RAM tier always leaves to fills."""
    return min(WORK_EXTENTS, fillers * FILLS) * extent_bytes


def footprint_bytes(fillers: int, extent_bytes: int, shares: bool = False) -> int:
    """Peak memory in bytes of the daemon and its processes, without the RAM tier. `shares`: in a cluster."""
    processes_bytes = DAEMON_BYTES + fillers * FILLER_BYTES + shares * AGENT_BYTES
    return processes_bytes + work_bytes(fillers, extent_bytes)


def largest_ram_bytes(allowed: int, own_bytes: int) -> int:
    """The largest RAM budget with which no process is killed for memory.

    Cgroups and machine allow `allowed` bytes; the daemon's processes take `own_bytes` of them.
    """
    return max(0, allowed - int(allowed * MEMORY_SPARE) - own_bytes)


def default_ram_bytes(allowed: int, own_bytes: int) -> int:
    """The default RAM budget in bytes: 10 % of `allowed`, and at most the largest budget."""
    return min(allowed // 10, largest_ram_bytes(allowed, own_bytes))
