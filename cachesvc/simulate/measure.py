"""Measures a simulated run: its clock, its epochs, the steps that ranks take together, and the source's rate."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

WINDOW = 0.05
"""The part of an epoch over which the peak of the source's rate is measured."""


@dataclass(frozen=True, slots=True)
class EpochResult:
    """One epoch. `hit_rate`: touched extents that cost the source nothing, as a part of all touched ones.

    `peak` is the highest source rate over any 5 % of the epoch, `mean` that of the whole epoch, in bytes/s. `ahead_bytes`:
    the most bytes that were fetched and not yet read at any time.
    """

    hit_rate: float
    source_bytes: int
    fills: int
    stall_s: float
    epoch_s: float
    peak: float
    mean: float
    ahead_bytes: int

    @property
    def peak_ratio(self) -> float:
        """The peak as a multiple of the mean; 1 where nothing was fetched."""
        return self.peak / self.mean if self.mean else 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a policy on a workload. The first epoch is cold, so rates are means over the others."""

    policy: str
    bound: float
    epochs: tuple[EpochResult, ...]

    @property
    def _warm(self) -> tuple[EpochResult, ...]:
        return self.epochs[1:] or self.epochs

    @property
    def hit_rate(self) -> float:
        """The mean hit rate of the warm epochs."""
        return sum(epoch.hit_rate for epoch in self._warm) / len(self._warm)

    @property
    def source_bytes(self) -> int:
        """Bytes from the source over all epochs, the cold one included."""
        return sum(epoch.source_bytes for epoch in self.epochs)

    @property
    def peak(self) -> float:
        """The highest source rate over any 5 % of a warm epoch, bytes/s."""
        return max(epoch.peak for epoch in self._warm)

    @property
    def peak_ratio(self) -> float:
        """The highest ratio of a warm epoch's peak to that epoch's own mean."""
        return max(epoch.peak_ratio for epoch in self._warm)

    @property
    def stall_s(self) -> float:
        """The mean seconds that a warm epoch waited for data."""
        return sum(epoch.stall_s for epoch in self._warm) / len(self._warm)

    @property
    def epoch_s(self) -> float:
        """The mean seconds of a warm epoch."""
        return sum(epoch.epoch_s for epoch in self._warm) / len(self._warm)


@dataclass
class Meter:
    """Collects one epoch's numbers while it runs."""

    began: float
    touched: set[int] = field(default_factory=set)
    fetched: set[int] = field(default_factory=set)
    fills: list[tuple[float, int]] = field(default_factory=list)
    stall_s: float = 0.0
    ahead_bytes: int = 0

    def fill(self, now: float, extent: int, size_bytes: int) -> None:
        """Count bytes that arrived from the source."""
        self.fetched.add(extent)
        self.fills.append((now, size_bytes))

    def close(self, now: float) -> EpochResult:
        """End the epoch; its result."""
        total = sum(size for _, size in self.fills)
        span = now - self.began
        hits = len(self.touched - self.fetched) / len(self.touched) if self.touched else 1.0
        return EpochResult(
            hit_rate=hits,
            source_bytes=total,
            fills=len(self.fills),
            stall_s=self.stall_s,
            epoch_s=span,
            peak=peak_rate(self.fills, WINDOW * span),
            mean=total / span if span else 0.0,
            ahead_bytes=self.ahead_bytes,
        )


def peak_rate(fills: Sequence[tuple[float, int]], window_s: float) -> float:
    """The most bytes that arrived within any `window_s`, per second. `fills` are (time, bytes), in the order of time."""
    if window_s <= 0:
        return 0.0
    inside: deque[tuple[float, int]] = deque()
    most = size = 0
    for at, size_bytes in fills:
        inside.append((at, size_bytes))
        size += size_bytes
        while inside[0][0] <= at - window_s:
            size -= inside.popleft()[1]
        most = max(most, size)
    return most / window_s


class Epochs:
    """Meters of the epochs that some rank is in. An epoch ends with the last of `ranks`.

    In each step, `in_step` ranks wait for each other, as ranks that average gradients do. With 1, no rank waits.
    """

    def __init__(self, clock: Clock, ranks: int, in_step: int = 1) -> None:
        self.results: list[EpochResult] = []
        self._clock = clock
        self._ranks = ranks
        self._in_step = in_step
        self._arrived: list[Callable[[], None]] = []
        self._meters: dict[int, Meter] = {}
        self._ended: dict[int, int] = {}

    def meter(self, epoch: int) -> Meter:
        """The meter of an epoch, started by its first rank."""
        return self._meters.setdefault(epoch, Meter(self._clock.now))

    def running(self) -> list[Meter]:
        """The meters of all epochs that have begun and not ended, the earliest first."""
        return [self._meters[epoch] for epoch in sorted(self._meters)]

    def arrive(self, go_on: Callable[[], None]) -> None:
        """Note that a rank is done with a step. It goes on once the others are done too."""
        self._arrived.append(go_on)
        if len(self._arrived) == self._in_step:
            arrived, self._arrived = self._arrived, []
            for each in arrived:
                each()

    def ended(self, epoch: int) -> None:
        """Note that a rank has finished an epoch. The last rank closes the meter."""
        self._ended[epoch] = self._ended.get(epoch, 0) + 1
        if self._ended[epoch] == self._ranks:
            self.results.append(self._meters.pop(epoch).close(self._clock.now))


class Clock:
    """Virtual seconds. Actions that are due at the same time run in the order in which they were added."""

    __slots__ = ("_heap", "_number", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._number = 0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run `action` when `delay_s` have passed."""
        self._number += 1
        heapq.heappush(self._heap, (self.now + max(0.0, delay_s), self._number, action))

    def step(self) -> bool:
        """Jump to the next action and run it; False where there is none."""
        if not self._heap:
            return False
        self.now, _, action = heapq.heappop(self._heap)
        action()
        return True
