"""Simulated clusters: the source is asked once, and the nodes together keep what one node of their size would."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.__main__ import run
from cachesvc.simulate.measure import Result
from cachesvc.simulate.simulated_node import NodeSpec, SourceSpec, tiers_of
from cachesvc.simulate.simulation import Simulation
from cachesvc.simulate.trace import Workload, trace
from tests.support.core.invariants import checked


def workload(nodes: int, shards: int, epochs: int = 3, seed: int = 0) -> Workload:
    """A job with one rank on each node."""
    return Workload(
        shards=shards,
        samples_per_shard=4,
        batch=4 * nodes,
        epochs=epochs,
        ranks=nodes,
        nodes=nodes,
        seed=seed,
    )


def cluster(work: Workload, f: float, faults: float = 0.0) -> Simulation:
    """Nodes that can each hold `f` of the data."""
    source = SourceSpec(fault_rate=faults)
    tiers = tiers_of(int(f * work.size_bytes))
    return Simulation(NodeSpec(tiers, source=source), work)


def reserved(simulation: Simulation) -> float:
    """The room that all windows together take, as a part of the data."""
    tiers = (tier for node in simulation.nodes for tier in node.core.policy.tiers.values())
    return sum(tier.reserve_bytes for tier in tiers) / simulation.workload.size_bytes


def held_to_the_bound(nodes: int, f: float, shards: int, seed: int = 0) -> None:
    """Assert that warm epochs hit what the nodes' room without their windows allows, and that cold ones fetch once."""
    work = workload(nodes, shards, seed=seed)
    simulation = cluster(work, f)
    epochs = simulation.run()
    bound = min(1.0, nodes * f - reserved(simulation))
    assert Result("keep", bound, tuple(epochs)).hit_rate >= bound - 0.03
    assert epochs[0].source_bytes <= 1.02 * work.size_bytes


@pytest.mark.parametrize(
    ("nodes", "f"), [(2, 0.05), pytest.param(4, 0.25, marks=pytest.mark.slow), (8, 0.10)]
)
def test_the_nodes_keep_together_what_their_room_allows(nodes: int, f: float) -> None:
    held_to_the_bound(nodes, f, 400)


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("f", [0.05, 0.10, 0.25, 0.50])
@pytest.mark.parametrize("seed", [0, 1])
def test_five_thousand_extents_are_kept_at_the_bound(nodes: int, f: float, seed: int) -> None:
    held_to_the_bound(nodes, f, 5000, seed)


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "f", "cost"), [(8, 0.05, 0.05), (4, 0.25, 0.03)])
def test_windows_cost_a_cluster_of_five_thousand_extents_little(nodes: int, f: float, cost: float) -> None:
    """A rotated run begins within an extent, so that one step may read from two windows, and the room for windows is larger
    than it would be where steps and windows end together."""
    work = workload(nodes, 5000)
    assert Result("keep", nodes * f, tuple(cluster(work, f).run())).hit_rate >= nodes * f - cost


@pytest.mark.parametrize(("nodes", "idle", "f"), [(1, 3, 0.5), (2, 2, 0.4)])
def test_a_job_on_some_of_the_members_keeps_what_its_own_nodes_have_room_for(
    nodes: int, idle: int, f: float
) -> None:
    """Members that do not claim the dataset keep nothing of what they own."""
    work = workload(nodes, 400)
    spec = NodeSpec(tiers_of(int(f * work.size_bytes)))
    simulation = Simulation(spec, work, idle_nodes=idle)
    epochs = simulation.run()
    assert Result("keep", nodes * f, tuple(epochs)).hit_rate >= nodes * f - reserved(simulation) - 0.03


def test_nodes_that_read_their_own_samples_fetch_each_byte_once_in_the_run() -> None:
    work = replace(workload(4, 100), shuffle_scope="node")
    simulation, moved = cluster(work, 0.25), list[tuple[int, int]]()
    simulation.run(lambda _: moved.append((simulation.source_bytes, simulation.peer_bytes)))
    assert moved == [(work.size_bytes, 0)] * 3


@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("f", [0.25, 1.1])
def test_nodes_that_prefetch_at_once_fetch_each_byte_once(nodes: int, f: float) -> None:
    work = workload(nodes, 240)
    simulation = cluster(work, f)
    assert simulation.prefetch() <= 1.02 * work.size_bytes
    if f > 1:
        assert simulation.source_bytes == work.size_bytes
        assert simulation.peer_bytes == (nodes - 1) * work.size_bytes


def test_what_a_node_reads_from_a_peer_takes_the_time_of_their_links() -> None:
    work = workload(2, 100)
    spec = NodeSpec(tiers_of(2 * work.size_bytes))
    ends = []
    for rate in (1e9, 1e8):
        simulation = Simulation(spec, work, rate)
        simulation.prefetch()
        ends.append(simulation.clock.now)
    assert ends[1] >= 50 * work.shard_bytes / 1e8 > ends[0], (
        "each node sends half of the data to the other one"
    )


def test_the_same_seed_gives_the_same_run() -> None:
    work = workload(3, 60)
    runs = [cluster(work, 0.2, faults=0.1).run() for _ in range(2)]
    assert runs[0] == runs[1]
    assert cluster(replace(work, seed=1), 0.2, faults=0.1).run() != runs[0]


@settings(max_examples=25, deadline=None)
@given(
    shards=st.integers(4, 40),
    window=st.integers(0, 8),
    nodes=st.integers(2, 4),
    ranks=st.integers(1, 2),
    f=st.floats(0.05, 1.2),
    ram=st.sampled_from([1.0, 0.4]),
    faults=st.sampled_from([0.0, 0.2]),
    declared=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_every_epoch_of_every_cluster_ends_with_its_invariants_intact(
    shards: int,
    window: int,
    nodes: int,
    ranks: int,
    f: float,
    ram: float,
    faults: float,
    declared: bool,
    seed: int,
) -> None:
    """Nodes that wait for each other's fills make progress with any room, and none fetches for nothing."""
    work = Workload(
        shards,
        samples_per_shard=6,
        shard_bytes=1000,
        batch=2 * nodes * ranks,
        window=window,
        epochs=3,
        ranks=nodes * ranks,
        nodes=nodes,
        seed=seed,
    )
    capacity = max(4000, int(f * work.size_bytes))
    tiers = tiers_of(max(2000, int(ram * capacity)), capacity - int(ram * capacity))
    spec = NodeSpec(tiers, source=SourceSpec(fault_rate=faults), declared=declared)
    simulation = checked(Simulation(spec, work), 7)
    results = simulation.run()
    touches = sum(
        len(step)
        for epoch in range(3)
        for rank in range(work.ranks)
        for step in trace(work, epoch, rank).steps
    )
    assert sum(result.fills for result in results) <= touches


def test_the_command_simulates_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--shards", "200", "--epochs", "3", "--cache", "0.2", "--json"]
    assert run([*words, "--nodes", "4", "--policy", "keep"]) == 0
    together = json.loads(capsys.readouterr().out)
    assert together["nodes"] == 4
    assert together["bound"] == pytest.approx(0.8)
    assert (
        together["hit_rate"] > 0.55
    )  # windows are open side by side, and two nodes read each extent at a border
    assert run([*words, "--nodes", "3"]) == 2
    assert "3 ranks" in capsys.readouterr().err
