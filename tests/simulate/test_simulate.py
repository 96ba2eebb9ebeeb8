"""The simulated node against the closed formulas, and the promises of the keep policy at full size."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.__main__ import run
from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.errors import CacheError
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.simulate.compare import EXPECTED, PolicyName, simulate
from cachesvc.simulate.measure import Result, peak_rate
from cachesvc.simulate.simulated_node import DATASET, NodeSpec, SourceSpec, tiers_of
from cachesvc.simulate.simulation import Simulation
from cachesvc.simulate.trace import Workload, trace
from tests.support.core.invariants import checked

FRACTIONS = (0.1, 0.35, 0.5, 0.8)
FULL = Workload(shards=2000, epochs=8)


def spec_of(work: Workload, f: float, ram: float = 1.0) -> NodeSpec:
    """A node that can hold `f` of the data, a part `ram` of that in RAM and the rest on NVMe."""
    capacity = int(f * work.size_bytes)
    return NodeSpec(tiers_of(int(ram * capacity), capacity - int(ram * capacity)))


def kept(spec: NodeSpec, work: Workload, f: float) -> Result:
    """Simulate with the invariants checked at times: kept bytes and bytes ahead stay within each budget."""
    return Result("keep", f, tuple(checked(Simulation(spec, work), 5000).run()))


def held_to_the_promise(result: Result, work: Workload, f: float) -> None:
    """Assert the policy's promise: hits, source bytes, bytes ahead, and an even source rate."""
    size, capacity = work.size_bytes, int(f * work.size_bytes)
    assert all(abs(epoch.hit_rate - f) <= 0.01 for epoch in result.epochs[1:])
    assert result.source_bytes <= 1.02 * (size + (work.epochs - 1) * (size - capacity))
    assert max(epoch.ahead_bytes for epoch in result.epochs) <= 0.006 * size
    assert max(epoch.peak_ratio for epoch in result.epochs) <= 1.25, "the cold one included"


@pytest.mark.parametrize(("f", "ram"), [pytest.param(0.5, 1.0, marks=pytest.mark.slow), (0.8, 0.2)])
def test_two_thousand_shards_are_kept_at_the_bound_with_an_even_source_rate(f: float, ram: float) -> None:
    work = replace(FULL, epochs=4)
    held_to_the_promise(kept(spec_of(work, f, ram), work, f), work, f)


@pytest.mark.slow
@pytest.mark.parametrize("f", FRACTIONS)
@pytest.mark.parametrize("ram", [1.0, 0.5, 0.2, 0.05])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_eight_epochs_at_each_size_and_split_of_the_cache_hold_the_promise(
    f: float, ram: float, seed: int
) -> None:
    work = replace(FULL, seed=seed)
    held_to_the_promise(kept(spec_of(work, f, ram), work, f), work, f)


@pytest.mark.parametrize(
    ("window", "f", "ram", "most"),
    [
        pytest.param(128, 0.5, 1.0, 0.8, marks=pytest.mark.slow),
        (64, 0.5, 0.2, 0.7),
        pytest.param(30, 0.1, 1.0, 1.0, marks=pytest.mark.slow),
        pytest.param(16, 0.2, 0.1, 0.9, marks=pytest.mark.slow),
    ],
)
def test_a_shuffle_window_that_the_cache_holds_costs_each_extent_one_fetch_an_epoch(
    window: int, f: float, ram: float, most: float
) -> None:
    work = Workload(shards=400, batch=16, samples_per_shard=64, window=window, epochs=3)
    first, *later = simulate("keep", spec_of(work, f, ram), work).epochs
    assert first.source_bytes <= 1.01 * work.size_bytes
    assert all(epoch.source_bytes <= most * work.size_bytes for epoch in later)


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_retention_trades_places_under_faults_with_every_invariant_intact(seed: int) -> None:
    """Kept extents move between tiers only by being fetched, and as much is kept as before."""
    work = Workload(shards=240, samples_per_shard=4, shard_bytes=1000, batch=4, epochs=4, seed=seed)
    spec = replace(spec_of(work, 0.7, 0.3), source=SourceSpec(fault_rate=0.1))
    simulation = checked(Simulation(spec, work), 5)
    simulation.node.log = []
    results = simulation.run()
    assert all(abs(epoch.hit_rate - 0.7) <= 0.04 for epoch in results[1:])
    began = [at for at, command in simulation.node.log if isinstance(command, cmd.StartFill)][work.shards]
    later = [
        command for at, command in simulation.node.log if at > began and isinstance(command, cmd.StartFill)
    ]
    assert {command.tier for command in later if command.from_tier is None} == {"ram", "nvme0"}


@pytest.mark.parametrize("f", [0.35, pytest.param(0.8, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("policy", "off"),
    [
        pytest.param("undeclared", 0.02, marks=pytest.mark.slow),
        ("lru", 0.01),
        ("random", 0.01),
        ("belady", 0.01),
    ],
)
def test_policies_match_their_formulas(policy: PolicyName, off: float, f: float) -> None:
    work = Workload(shards=1500, epochs=7, samples_per_shard=4, batch=4, window=1, seed=3)
    results = simulate(policy, spec_of(work, f), work).epochs
    steady = [epoch.hit_rate for epoch in results[3:]]
    assert abs(sum(steady) / len(steady) - EXPECTED[policy](f)) <= off


def test_the_node_reports_each_epochs_hits_against_its_bound() -> None:
    work = Workload(shards=200, epochs=4, seed=2)
    simulation = Simulation(spec_of(work, 0.5), work)
    measured = simulation.run()
    told = simulation.node.core.counters(DATASET).epochs
    assert [epoch.number for epoch in told] == [0, 1, 2, 3]
    for epoch, result in zip(told, measured, strict=True):
        assert epoch.touched == work.shards
        assert abs(epoch.hit_rate - result.hit_rate) <= 0.005
        assert epoch.of_bound == pytest.approx(epoch.hit_rate / 0.5)


def test_belady_hits_first_and_then_nothing_where_keep_is_even() -> None:
    work = Workload(shards=1000, epochs=4)
    spec = replace(spec_of(work, 0.5), step_s=5.0)
    belady, keep = (simulate(policy, spec, work) for policy in ("belady", "keep"))
    assert belady.peak_ratio > 1.8
    assert keep.peak_ratio < 1.3


def test_readers_do_not_demand_what_they_hold_and_hold_only_kept_extents_for_long() -> None:
    for f, grants in ((1.1, 60), (0.5, 180)):  # kept extents are released too where the rest streams
        work = Workload(shards=60, epochs=3)
        simulation = Simulation(spec_of(work, f), work)
        simulation.node.log = []
        simulation.run()
        found = [command for _, command in simulation.node.log if isinstance(command, cmd.Grant)]
        assert abs(len(found) - grants) <= 12
        held = set().union(*(rank.holding.held for rank in simulation.node.ranks.values()))
        assert len(held) == 60 if f > 1 else len(held) <= 8


@pytest.mark.parametrize("policy", ["keep", "undeclared", "lru", "random", "belady"])
def test_fetches_that_fail_cost_time_and_no_hit(policy: PolicyName) -> None:
    work = Workload(shards=200, epochs=3)
    sound, faulty = (
        simulate(policy, replace(spec_of(work, 0.5), step_s=0.001, source=SourceSpec(fault_rate=rate)), work)
        for rate in (0.0, 0.4)
    )
    assert faulty.stall_s > 1.05 * sound.stall_s
    assert faulty.hit_rate == pytest.approx(sound.hit_rate, abs=0.02)


def test_the_same_seed_gives_the_same_trace_and_another_one_another() -> None:
    work = Workload(shards=60, epochs=2, seed=5)
    logs = []
    for seeded in (work, work, replace(work, seed=6)):
        simulation = Simulation(replace(spec_of(seeded, 0.4), source=SourceSpec(fault_rate=0.1)), seeded)
        simulation.node.log = []
        simulation.run()
        logs.append(simulation.node.log)
    assert logs[0] == logs[1] != logs[2]


def test_a_failure_says_how_to_repeat_it() -> None:
    work = Workload(shards=8, epochs=2, seed=11)
    simulation = Simulation(spec_of(work, 0.5), work)
    simulation.node.core.handle(ev.TierLost(simulation.node.spec.tiers[0].name), 0.0)
    with pytest.raises(CacheError, match=r"again with Workload\(shards=8.*seed=11"):
        simulation.run()


def test_a_trace_is_the_order_that_the_loader_reads() -> None:
    work = Workload(shards=20, samples_per_shard=8, batch=8, window=3, ranks=2, seed=9)
    order = work.order(4)
    assert order.spec == OrderSpec(9, 8, 3)
    for rank in range(2):
        found = trace(work, 4, rank)
        samples = order.slots(0, order.full_steps, 4 * rank, 4 * rank + 4)
        assert [set(step) for step in found.steps] == [set(row) for row in (samples // 8).tolist()]
        rows = list(found.plan)
        for at, step in enumerate(found.steps):
            assert all(any(e == x and a <= at <= b for e, a, b in rows) for x in step)


def test_the_peak_is_the_fullest_window() -> None:
    assert peak_rate([(0.0, 10), (1.0, 10), (1.5, 30), (4.0, 20)], 2.0) == 25.0
    assert peak_rate([], 1.0) == 0.0


@settings(max_examples=25, deadline=None)
@given(
    shards=st.integers(2, 40),
    window=st.integers(0, 12),
    ranks=st.sampled_from([1, 2, 4]),
    f=st.floats(0.05, 1.2),
    ram=st.sampled_from([1.0, 0.4]),
    faults=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
)
def test_every_epoch_ends_with_a_bounded_number_of_fills(
    shards: int, window: int, ranks: int, f: float, ram: float, faults: float, seed: int
) -> None:
    """Readers make progress with any shuffle window and room, and each fill serves a reader."""
    work = Workload(
        shards,
        samples_per_shard=4,
        shard_bytes=1000,
        batch=8,
        window=window,
        epochs=3,
        ranks=ranks,
        seed=seed,
    )
    capacity = max(2000, int(f * work.size_bytes))
    tiers = tiers_of(max(1000, int(ram * capacity)), capacity - int(ram * capacity))
    spec = NodeSpec(tiers, source=SourceSpec(fault_rate=faults))
    simulation = checked(Simulation(spec, work), 7)
    simulation.run()
    touches = sum(len(step) for e in range(3) for r in range(ranks) for step in trace(work, e, r).steps)
    plans = sum(len(trace(work, e, r).plan) for e in range(3) for r in range(ranks))
    assert sum(result.fills for result in simulation.epochs.results) <= touches + plans


def test_a_shuffle_window_far_larger_than_the_room_fetches_on_demand_only() -> None:
    """Four readers shuffle all of one dataset, with room for a third of it."""
    work = Workload(shards=24, samples_per_shard=32, shard_bytes=1000, batch=32, window=0, epochs=2, ranks=4)
    simulation = checked(Simulation(NodeSpec(tiers_of(8000)), work), 50)
    results = simulation.run()
    touches = sum(len(step) for rank in range(4) for step in trace(work, 1, rank).steps)
    assert results[1].fills <= touches * (1 - 8 / 24) * 1.1
    assert simulation.node.core.policy.reserve.oversubscribed


@pytest.mark.parametrize("option", ["--cache", "--ram", "--step-s", "--latency-s", "--faults"])
@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_an_option_that_is_not_a_number_is_refused_in_one_line(
    option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["simulate", "--shards", "60", "--epochs", "2", f"{option}={value}"]) == 2
    said = capsys.readouterr().err
    assert option in said
    assert "Traceback" not in said


def test_the_command_prints_a_table_with_a_plot_and_json(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["simulate", "--shards", "60", "--epochs", "2", "--cache", "0.5"]
    assert run(words) == 0
    table = capsys.readouterr().out
    assert "belady" in table
    assert "####" in table
    for head in ("hits", "expected", "bound", "peak rate", "to mean", "stall", "epoch"):
        assert head in table
    assert run([*words, "--policy", "keep", "--ram", "0.5", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert row["policy"] == "keep"
    assert row["hit_rate"] <= row["bound"] == 0.5
    assert len(row["epochs"]) == 2
    assert row["peak_bytes_per_s"] > 0
    assert row["peak_ratio"] >= 1
    assert row["epoch_s"] > row["stall_s"] >= 0
    assert row["source_bytes"] > 0
    assert run([*words, "--policy", "mru"]) == 2


def test_a_batch_beyond_all_samples_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["simulate", "--shards", "10", "--samples", "1", "--batch", "11", "--epochs", "2"]) == 2
    assert "an epoch has no step" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--cache", "1e-12", "--policy", "random"], "room for one shard"),
        (["--cache", "0.3", "--policy", "keep"], "room for one shard"),
        (["--cache", "0.6", "--ram", "0.5", "--policy", "keep"], "room for one shard"),
        (["--cache", "1", "--latency-s", "1e308"], "--latency-s"),
        (["--cache", "1", "--step-s", "1e308"], "--step-s"),
        (["--cache", "1", "--seed", str(1 << 64)], "--seed"),
    ],
)
def test_a_workload_that_cannot_be_simulated_is_refused_at_once(
    capsys: pytest.CaptureFixture[str], words: list[str], named: str
) -> None:
    assert run(["simulate", "--shards", "3", "--epochs", "2", "--json", *words]) == 2
    out, error = capsys.readouterr()
    assert not out
    assert named in json.loads(error)["error"]
