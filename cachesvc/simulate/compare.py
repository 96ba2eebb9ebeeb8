"""Compares policies on one trace: keep and LRU are the real core, random and Belady are references.

Beside them stand hit rates in closed form: f = cache / data, every epoch a uniform shuffle, steady state.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Literal, get_args

from cachesvc.simulate.measure import Result
from cachesvc.simulate.oracles import BeladyCache, RandomCache, replay
from cachesvc.simulate.simulated_node import NodeSpec
from cachesvc.simulate.simulated_source import SimulatedSource
from cachesvc.simulate.simulation import Simulation
from cachesvc.simulate.trace import Workload, trace


def keep(f: float) -> float:
    """A fixed part is kept, or Belady's choice: f, the bound for every demand-fill policy."""
    return min(1.0, f)


def lru(f: float) -> float:
    """Least recently used: f + (1 - f) ln(1 - f)."""
    return 1.0 if f >= 1 else f + (1 - f) * math.log(1 - f)


def random_eviction(f: float) -> float:
    """A random victim: -f ln[1 - f (1 - e^(-1/f))]."""
    return 1.0 if f >= 1 else -f * math.log(1 - f * (1 - math.exp(-1 / f)))


EXPECTED = {"keep": keep, "lru": lru, "random": random_eviction, "belady": keep}
"""Hit rates by policy."""
PolicyName = Literal["keep", "lru", "random", "belady"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def simulate(policy: PolicyName, spec: NodeSpec, workload: Workload) -> Result:
    """Run every epoch. The references have one rank, and the tiers' budgets of all nodes as one capacity. Raises
    CacheError."""
    capacity = workload.nodes * sum(tier.budget_bytes for tier in spec.tiers)
    bound = min(1.0, capacity / workload.size_bytes)
    if policy in ("keep", "lru"):
        epochs = Simulation(replace(spec, declared=policy == "keep"), workload).run()
        return Result(policy, bound, tuple(epochs))
    room = min(workload.shards, capacity // workload.shard_bytes)
    cache = RandomCache(room, workload.seed) if policy == "random" else BeladyCache(room)
    alone = replace(workload, ranks=1, nodes=1)
    traces = [trace(alone, epoch) for epoch in range(alone.epochs)]
    source = SimulatedSource(spec.source, workload.seed)
    return Result(policy, bound, tuple(replay(cache, alone, traces, source, spec.step_s)))
