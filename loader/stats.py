"""The stall clock: how long each step waited for data, and where the bytes lay."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass

import numpy as np

WAITS_KEPT = 65_536
"""Percentiles are over the last so many steps: 512 KiB."""


@dataclass(frozen=True, slots=True)
class Stats:
    """One epoch so far, of this rank. Times in seconds; `wait_s` is what steps waited for data in total.

    `bytes_by_origin` counts what this rank read, its workers included, by where it lay ("ram", "nvme", "direct",
    "local").
    """

    steps: int
    samples: int
    elapsed_s: float
    wait_s: float
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    bytes_by_origin: dict[str, int]

    @property
    def samples_per_s(self) -> float:
        """Samples handed over per second of elapsed time."""
        return self.samples / self.elapsed_s if self.elapsed_s else 0.0


class StallClock:
    """Started when a step asks for data, stopped when it has it: two clock reads a step."""

    def __init__(self, bytes_before: dict[str, int]) -> None:
        self._bytes_before = bytes_before
        self._begun = time.perf_counter()
        self._ended = self._begun
        self._waits = array("d", bytes(8 * WAITS_KEPT))
        self._steps = 0
        self._samples = 0
        self._wait_s = 0.0

    def record(self, asked: float, samples: int) -> None:
        """A step that asked at `asked` (perf_counter) now has its batch."""
        now = self._ended = time.perf_counter()
        waited = now - asked
        self._wait_s += waited
        self._waits[self._steps % WAITS_KEPT] = waited
        self._steps += 1
        self._samples += samples

    def stats(self, bytes_now: dict[str, int]) -> Stats:
        """What was seen so far."""
        kept = np.frombuffer(self._waits)[: min(self._steps, WAITS_KEPT)]
        p50, p95, p99 = np.percentile(kept, (50, 95, 99)) if len(kept) else (0.0, 0.0, 0.0)
        read = {origin: count - self._bytes_before.get(origin, 0) for origin, count in bytes_now.items()}
        elapsed = self._ended - self._begun
        return Stats(
            self._steps, self._samples, elapsed, self._wait_s, float(p50), float(p95), float(p99), read
        )
