"""What making a batch waited for, by cause, on the thread that makes it."""

from __future__ import annotations

import threading
import time

from cachesvc.client.protocol import Granted
from cachesvc.core.stalls import CAUSES

READING = CAUSES[:3]
"""What is counted where it waits: source, peer, disk. The rest is told apart by when a batch was whole."""
SOURCE, PEER, DISK, DECODE, HAND_OVER, TRANSFER = range(len(CAUSES))


class WaitClock(threading.local):
    """Seconds by `READING` of the thread that asks, since it began. Nothing is counted where nothing waits:
    two clock reads an acquired extent, and two a batch that reads from files."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(READING)

    def read(self, began: float) -> None:
        """Reads from files that began at `began` (perf_counter) are done."""
        self.seconds[DISK] += time.perf_counter() - began

    def acquired(self, began: float, granted: Granted | None) -> None:
        """An extent that was asked for at `began` is there, or is read elsewhere. A local file was opened; any other
        extent was filled from a peer or the source, where it took any time at all."""
        cause = SOURCE
        if granted is not None and granted.origin == "local":
            cause = DISK
        elif granted is not None and granted.from_peer:
            cause = PEER
        self.seconds[cause] += time.perf_counter() - began
