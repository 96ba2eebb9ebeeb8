"""One rate limit for the direct reads of all of a user's processes on a node: 64 ranks must not fetch at 64 times it.

The generic cell rate algorithm (virtual scheduling, ITU-T I.371, annex A): the state is one number, the theoretical
arrival time at which all granted bytes are used up. It is in a file that each process locks to advance it, so there is no
server, and a process that dies leaves nothing to clean up.
"""

from __future__ import annotations

import fcntl
import logging
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

from cachesvc.config import parse_size
from cachesvc.core.errors import InvalidInput
from cachesvc.system.descriptors import closing_fd

DEFAULT = "1GiB"
VARIABLE = "CACHESVC_DIRECT_RATE"
BURST_S = 0.25
"""The burst: unused rate of up to so many seconds may be used at once."""
_UNTIL = struct.Struct("<d")
_log = logging.getLogger("cachesvc")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedRate:
    """Grants bytes at one rate to all processes that use the same file. Safe to share between threads."""

    def __init__(self, path: str, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` returns seconds, the same in all processes."""
        self._path, self._bytes_per_s, self._clock = path, bytes_per_s, clock

    def take(self, size_bytes: int) -> float:
        """Reserve bytes; returns the seconds to wait before they are fetched. Later callers wait behind them."""
        alone_s = size_bytes / self._bytes_per_s
        try:
            return self._reserve(alone_s)
        except OSError as error:  # a full disk, or one without locks
            _log.warning(
                "each process keeps its own rate of direct reads: %s: %s", self._path, error.strerror
            )
            return alone_s

    def _reserve(self, by_s: float) -> float:
        # Opened for each call: a lock belongs to an open file description, which threads and forked children share.
        with closing_fd(
            os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        ) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            held, now = os.pread(file, _UNTIL.size, 0), self._clock()
            until = _UNTIL.unpack(held)[0] if len(held) == _UNTIL.size else 0.0
            until = max(until, now - BURST_S) + by_s
            os.pwrite(file, _UNTIL.pack(until), 0)
        return max(0.0, until - now)


def direct_rate(folder: str) -> SharedRate:
    """This user's rate limit on this node: CACHESVC_DIRECT_RATE bytes a second. Its file is in the user's own folder,
    which nodes may share. Raises InvalidInput for a value that is not a rate."""
    given = os.environ.get(VARIABLE) or DEFAULT
    try:
        bytes_per_s = parse_size(given)
    except InvalidInput as error:
        raise InvalidInput(f"{VARIABLE}: {error}") from None
    if not bytes_per_s:
        raise InvalidInput(f"{VARIABLE}={given!r} would read nothing; CACHESVC=require never reads directly")
    boot = _BOOT_ID.read_text().strip()  # differs by node, and by boot, at which the clock restarts
    return SharedRate(f"{folder}/direct-rate-{boot}", bytes_per_s)
