"""The time that making a batch waits, by cause, for the thread that makes it."""

from __future__ import annotations

import threading
import time

from cachesvc.client.protocol import Granted
from cachesvc.core.stalls import CAUSES

READING = CAUSES[:3]
"""The causes that are timed where they wait: source, peer, disk. The other causes follow from the times at which a batch
was complete and handed over."""
SOURCE, PEER, DISK, DECODE, HAND_OVER, TRANSFER = range(len(CAUSES))


class WaitClock(threading.local):
    """Seconds by `READING` that this thread has waited so far. A read that waits for nothing costs nothing: there are
    two clock reads per acquired extent, and two per batch that reads files."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(READING)

    def read(self, began: float) -> None:
        """Count a read of files that began at `began` (perf_counter) and ends now."""
        self.seconds[DISK] += time.perf_counter() - began

    def acquired(self, began: float, granted: Granted | None) -> None:
        """Count a request for an extent that began at `began` and ends now, with a grant or without. A local file was
        opened; any other extent that took time was filled, from a peer or from the source."""
        cause = SOURCE
        if granted is not None and granted.origin == "local":
            cause = DISK
        elif granted is not None and granted.from_peer:
            cause = PEER
        self.seconds[cause] += time.perf_counter() - began
