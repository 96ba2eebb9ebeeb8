"""A limit on the bytes per second that all connections together send."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from math import isinf

BURST_S = 0.05
"""Unused time that is kept: bytes of this time may be sent at once. Longer bursts would fill the queues of the link, which
the job's own traffic shares."""


class SendRate:
    """A token bucket whose senders wait in the order in which they ask: the generic cell rate algorithm of ITU-T I.371,
    annex A. Thread-safe."""

    def __init__(self, bytes_per_s: float, now: Callable[[], float] = time.monotonic) -> None:
        """`bytes_per_s`: infinite for no limit. `now` returns seconds of a clock that never goes back."""
        assert bytes_per_s > 0
        self._bytes_per_s = bytes_per_s
        self._now = now
        self._lock = threading.Lock()
        self._free_at = now()

    def take(self, size_bytes: int) -> float:
        """Take the tokens of `size_bytes`; return the seconds to wait before sending them."""
        if isinf(self._bytes_per_s):
            return 0.0
        with self._lock:
            now = self._now()
            begin = max(self._free_at, now - BURST_S)
            self._free_at = begin + size_bytes / self._bytes_per_s
        return max(0.0, begin - now)
