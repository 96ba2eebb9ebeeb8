"""Compares policies on one trace: keep and undeclared are the real core, LRU, random and Belady are references, which fetch
on demand, one extent after another.

Beside them stand hit rates in closed form: f = cache / data, every epoch a uniform shuffle, steady state.
"""

from __future__ import annotations

import heapq
import math
import random
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Literal, get_args

from cachesvc.core.tiering.admission import PASSED_SHARE
from cachesvc.simulate.measure import EpochResult, Meter, Result
from cachesvc.simulate.simulated_node import NodeSpec, SimulatedSource
from cachesvc.simulate.simulation import Simulation
from cachesvc.simulate.trace import EpochTrace, Workload, trace


class LruCache:
    """A cache that evicts the least recently used extent."""

    def __init__(self, room: int) -> None:
        self._room = room
        self._held: OrderedDict[int, None] = OrderedDict()

    def touch(self, extent: int, next_use: float) -> bool:
        """Return whether the extent was held. It is held afterwards."""
        held = extent in self._held
        self._held[extent] = None
        self._held.move_to_end(extent)
        if len(self._held) > self._room:
            self._held.popitem(last=False)
        return held


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
    cache: LruCache | RandomCache | BeladyCache,
    workload: Workload,
    traces: list[EpochTrace],
    source: SimulatedSource,
    step_s: float,
) -> Iterator[EpochResult]:
    """Read every epoch through the cache; each miss stalls for its fetch, and for those before it that failed."""
    uses = _next_uses(traces)
    now = 0.0
    for epoch in traces:
        meter = Meter(now)
        for step in epoch.steps:
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
    touches = [extent for epoch in traces for step in epoch.steps for extent in step]
    later: dict[int, int] = {}
    found = [0.0] * len(touches)
    for at in range(len(touches) - 1, -1, -1):
        found[at] = later.get(touches[at], float("inf"))
        later[touches[at]] = at
    return iter(found)


def keep(f: float) -> float:
    """A fixed part is kept, or Belady's choice: f, the bound for every demand-fill policy."""
    return min(1.0, f)


def lru(f: float) -> float:
    """Least recently used: f + (1 - f) ln(1 - f)."""
    return 1.0 if f >= 1 else f + (1 - f) * math.log(1 - f)


def random_eviction(f: float) -> float:
    """A random victim: -f ln[1 - f (1 - e^(-1/f))]."""
    return 1.0 if f >= 1 else -f * math.log(1 - f * (1 - math.exp(-1 / f)))


def undeclared(f: float) -> float:
    """A fixed part is kept, but for what passes (`core/tiering/admission.py`): 0.95 f."""
    return 1.0 if f >= 1 else (1 - PASSED_SHARE) * f


EXPECTED = {"keep": keep, "undeclared": undeclared, "lru": lru, "random": random_eviction, "belady": keep}
"""Hit rates by policy."""
PolicyName = Literal["keep", "undeclared", "lru", "random", "belady"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def simulate(policy: PolicyName, spec: NodeSpec, workload: Workload) -> Result:
    """Run every epoch. The references have one rank, and the tiers' budgets of all nodes as one capacity. Raises
    CacheError."""
    capacity = workload.nodes * sum(tier.budget_bytes for tier in spec.tiers)
    bound = min(1.0, capacity / workload.size_bytes)
    if policy in ("keep", "undeclared"):
        epochs = Simulation(replace(spec, declared=policy == "keep"), workload).run()
        return Result(policy, bound, tuple(epochs))
    room = min(workload.shards, capacity // workload.shard_bytes)
    cache: LruCache | RandomCache | BeladyCache
    if policy == "random":
        cache = RandomCache(room, workload.seed)
    else:
        cache = LruCache(room) if policy == "lru" else BeladyCache(room)
    alone = replace(workload, ranks=1, nodes=1)
    traces = [trace(alone, epoch) for epoch in range(alone.epochs)]
    source = SimulatedSource(spec.source, workload.seed)
    return Result(policy, bound, tuple(replay(cache, alone, traces, source, spec.step_s)))
