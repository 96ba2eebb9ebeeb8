"""Reference caches on the same trace: one that evicts at random, and Belady's. They fetch on demand, one after another."""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator

from cachesvc.simulate.measure import EpochResult, Meter
from cachesvc.simulate.simulated_source import SimulatedSource
from cachesvc.simulate.trace import EpochTrace, Workload


class RandomCache:
    """A cache that evicts a random extent."""

    def __init__(self, room: int, seed: int) -> None:
        self._room = room
        self._random = random.Random(seed)
        self._held: list[int] = []
        self._place: dict[int, int] = {}

    def touch(self, extent: int, next_use: float) -> bool:
        """Return whether the extent was held. It is held afterwards."""
        if extent in self._place:
            return True
        if len(self._held) < self._room:
            self._place[extent] = len(self._held)
            self._held.append(extent)
        elif self._room:
            at = self._random.randrange(self._room)
            del self._place[self._held[at]]
            self._held[at], self._place[extent] = extent, at
        return False


class BeladyCache:
    """A cache that evicts the extent with the latest next use, which may be the one just touched."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._next: dict[int, float] = {}
        self._last: list[tuple[float, int]] = []

    def touch(self, extent: int, next_use: float) -> bool:
        """Return whether the extent was held. `next_use`: when it is used again."""
        held = extent in self._next
        self._next[extent] = next_use
        heapq.heappush(self._last, (-next_use, extent))
        while len(self._next) > self._room:
            use, victim = heapq.heappop(self._last)
            if self._next.get(victim) == -use:
                del self._next[victim]
        return held


def replay(
    cache: RandomCache | BeladyCache,
    workload: Workload,
    traces: list[EpochTrace],
    source: SimulatedSource,
    step_s: float,
) -> Iterator[EpochResult]:
    """Read every epoch through the cache; each miss stalls for its fetch, and for those before it that failed."""
    uses = _next_uses(traces)
    now = 0.0
    for trace in traces:
        meter = Meter(now)
        for step in trace.steps:
            for extent in step:
                meter.touched.add(extent)
                if cache.touch(extent, next(uses)):
                    continue
                asked, failed = now, True
                while failed:
                    waited_s, failed = source.fetch(workload.shard_bytes, now)
                    now += waited_s
                meter.stall_s += now - asked
                meter.fill(now, extent, workload.shard_bytes)
            now += step_s
        yield meter.close(now)


def _next_uses(traces: list[EpochTrace]) -> Iterator[float]:
    """Yield for each touch the number of the touch at which its extent is used again; inf for none."""
    touches = [extent for trace in traces for step in trace.steps for extent in step]
    later: dict[int, int] = {}
    found = [0.0] * len(touches)
    for at in range(len(touches) - 1, -1, -1):
        found[at] = later.get(touches[at], float("inf"))
        later[touches[at]] = at
    return iter(found)
