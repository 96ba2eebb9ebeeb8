"""One rate for all processes of a user on a node that read around the daemon: 64 ranks must not be 64 times one.

Virtual scheduling (the generic cell rate algorithm, ITU-T I.371, annex A): one number, the moment until which what
was given out is used up, in a file that everybody locks to move it on. Nobody serves it, and who dies owes nothing.
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

DEFAULT = "1GiB"
VARIABLE = "CACHESVC_DIRECT_RATE"
BURST_S = 0.25
"""What was not used for so long may be used at once."""
_UNTIL = struct.Struct("<d")
_log = logging.getLogger("cachesvc")
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class SharedRate:
    """Gives out bytes at a rate to all that name the same file; for many threads."""

    def __init__(self, path: str, bytes_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock`: one that all processes share."""
        self._path, self._bytes_per_s, self._clock = path, bytes_per_s, clock

    def take(self, size_bytes: int) -> float:
        """Seconds to wait before these bytes are fetched: they are given out, and others wait behind them."""
        alone_s = size_bytes / self._bytes_per_s
        try:
            return self._moved_on(alone_s)
        except OSError as error:  # a full disk, or one without locks
            _log.warning(
                "each process keeps its own rate of direct reads: %s: %s", self._path, error.strerror
            )
            return alone_s

    def _moved_on(self, by_s: float) -> float:
        # Opened each time: a lock belongs to an opening, which threads and forked children would share.
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
            held, now = os.pread(file, _UNTIL.size, 0), self._clock()
            until = _UNTIL.unpack(held)[0] if len(held) == _UNTIL.size else 0.0
            until = max(until, now - BURST_S) + by_s
            os.pwrite(file, _UNTIL.pack(until), 0)
        finally:
            os.close(file)
        return max(0.0, until - now)


def direct_rate(folder: str) -> SharedRate:
    """This user's on this node, of CACHESVC_DIRECT_RATE bytes a second, kept in the user's own folder, which nodes
    may share. Raises InvalidInput for what is no rate."""
    given = os.environ.get(VARIABLE) or DEFAULT
    try:
        bytes_per_s = parse_size(given)
    except InvalidInput as error:
        raise InvalidInput(f"{VARIABLE}: {error}") from None
    if not bytes_per_s:
        raise InvalidInput(f"{VARIABLE}={given!r} would read nothing; CACHESVC=require never reads directly")
    boot = _BOOT_ID.read_text().strip()  # of this node, and of the clock, which begins anew with each boot
    return SharedRate(f"{folder}/direct-rate-{boot}", bytes_per_s)
