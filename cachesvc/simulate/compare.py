"""Compares policies on one trace: keep and LRU are the real core, random and Belady are references."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal, get_args

from cachesvc.simulate.cluster_simulation import ClusterSimulation
from cachesvc.simulate.measure import Result
from cachesvc.simulate.oracles import BeladyCache, RandomCache, replay
from cachesvc.simulate.simulated_node import NodeSpec
from cachesvc.simulate.simulated_source import SimulatedSource
from cachesvc.simulate.simulation import Simulation
from cachesvc.simulate.trace import Workload, trace

PolicyName = Literal["keep", "lru", "random", "belady"]
POLICIES: tuple[PolicyName, ...] = get_args(PolicyName)


def simulate(policy: PolicyName, spec: NodeSpec, workload: Workload) -> Result:
    """Run every epoch. The references have one rank, and the tiers' budgets of all nodes as one capacity. Raises
    CacheError."""
    capacity = workload.nodes * sum(tier.budget_bytes for tier in spec.tiers)
    bound = min(1.0, capacity / workload.size_bytes)
    if policy in ("keep", "lru"):
        simulation = ClusterSimulation if workload.nodes > 1 else Simulation
        epochs = simulation(replace(spec, declared=policy == "keep"), workload).run()
        return Result(policy, bound, tuple(epochs))
    room = min(workload.shards, capacity // workload.shard_bytes)
    cache = RandomCache(room, workload.seed) if policy == "random" else BeladyCache(room)
    alone = replace(workload, ranks=1, nodes=1)
    traces = [trace(alone, epoch) for epoch in range(alone.epochs)]
    source = SimulatedSource(spec.source, workload.seed)
    return Result(policy, bound, tuple(replay(cache, alone, traces, source, spec.step_s)))
