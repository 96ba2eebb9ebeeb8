"""The stall clock: how long each step waited for data, why, and which tier the bytes came from."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

import numpy as np

from cachesvc.core.histogram import BUCKETS, bucket_of
from cachesvc.core.stalls import CAUSES

WAITS_KEPT = 65_536
"""Percentiles cover the latest steps, at most this many: 2 MiB."""
MIN_SHOWN_S = 0.05
"""A cause below this would print as 0.0 s and is left out of the line."""


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of one rank's epoch so far. Times are in seconds; `wait_s` is the total time that steps waited for
    data.

    `wait_by_cause_s` (by `CAUSES` of `core/stalls.py`) sums to `wait_s`. `bytes_by_origin` counts what this rank
    and its workers read, by origin ("ram", "nvme", "direct", "local"). `bad_samples` counts samples that were
    skipped or replaced.
    """

    steps: int
    samples: int
    elapsed_s: float
    wait_s: float
    wait_p50_s: float
    wait_p95_s: float
    wait_p99_s: float
    bytes_by_origin: dict[str, int]
    wait_by_cause_s: dict[str, float]
    bad_samples: int = 0

    @property
    def samples_per_s(self) -> float:
        """Samples handed over per second of elapsed time."""
        return self.samples / self.elapsed_s if self.elapsed_s else 0.0

    def line(self) -> str:
        """Format for people: `120 steps, 9.1 s, waited 3.2 s (source 2.9 s, decode 0.3 s), p50 1.2 ms, ...`."""
        causes = sorted(self.wait_by_cause_s.items(), key=lambda each: -each[1])
        shown = ", ".join(f"{cause} {spent:.1f} s" for cause, spent in causes if spent >= MIN_SHOWN_S)
        waits = zip(("p50", "p95", "p99"), (self.wait_p50_s, self.wait_p95_s, self.wait_p99_s), strict=True)
        found = f", {self.bad_samples:,} bad samples" if self.bad_samples else ""
        return (
            f"{self.steps:,} batches, {self.samples:,} samples in {self.elapsed_s:.1f} s, waited {self.wait_s:.1f} s"
            + (f" ({shown})" if shown else "")
            + "".join(f", {name} {wait * 1e3:.1f} ms" for name, wait in waits)
            + found
        )


class StallClock:
    """Measures how long steps wait for data, with two clock reads per step. The causes are measured where they
    occur."""

    def __init__(self, bytes_before: dict[str, int], waited_before: Sequence[float], remainder: int) -> None:
        """`waited_before`: seconds by `CAUSES` before this epoch. `remainder`: the cause of time that nothing
        measured."""
        self._bytes_before, self._waited_before, self._remainder = bytes_before, waited_before, remainder
        self._begun = perf_counter()
        self._ended = self._begun
        self._waits: deque[float] = deque(maxlen=WAITS_KEPT)
        self.buckets = [0] * BUCKETS
        """The steps by how long each waited."""
        self._steps = 0
        self._samples = 0
        self._wait_s = 0.0

    def record(self, asked: float, samples: int) -> None:
        """Record that a step which asked at `asked` (perf_counter) has its batch."""
        now = self._ended = perf_counter()
        waited = now - asked
        self._wait_s += waited
        self._waits.append(waited)
        self._steps += 1
        self._samples += samples
        self.buckets[bucket_of(waited)] += 1

    def stats(self, bytes_now: dict[str, int], waited_now: Sequence[float], bad_samples: int) -> Stats:
        """Return the statistics so far."""
        # Nearest rank: numpy's percentile imports numpy.ma, 2.5 MB in the first epoch of every trainer.
        waits = np.sort(np.array(self._waits or [0.0]))
        p50, p95, p99 = (float(waits[-(-waits.size * percent // 100) - 1]) for percent in (50, 95, 99))
        return Stats(
            steps=self._steps,
            samples=self._samples,
            elapsed_s=self._ended - self._begun,
            wait_s=self._wait_s,
            wait_p50_s=p50,
            wait_p95_s=p95,
            wait_p99_s=p99,
            bytes_by_origin={
                origin: count - self._bytes_before.get(origin, 0) for origin, count in bytes_now.items()
            },
            wait_by_cause_s=by_cause(
                [now - before for now, before in zip(waited_now, self._waited_before, strict=True)],
                self._wait_s,
                self._remainder,
            ),
            bad_samples=bad_samples,
        )


def by_cause(seconds: Sequence[float], wait_s: float, remainder: int) -> dict[str, float]:
    """Return measured seconds by cause, made to sum to `wait_s`: unmeasured time goes to the cause `remainder`."""
    measured = sum(seconds)
    scale = min(1.0, wait_s / measured) if measured else 0.0
    found = [each * scale for each in seconds]
    found[remainder] += wait_s - sum(found)
    return dict(zip(CAUSES, found, strict=True))
