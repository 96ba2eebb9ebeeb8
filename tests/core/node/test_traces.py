"""Whole epochs through the node: hit rates against the bound, and the cost of a hit."""

from __future__ import annotations

import random
import time

from cachesvc.core.commands import Evict, Grant, StartFill
from cachesvc.core.events import DatasetDeclared, Demanded, Event, Passed, Planned, Released
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from tests.support.core.instant import carry_out
from tests.support.core.invariants import check

SIZE = 64
DATASET = DatasetId("d")
READER = ReaderId(1)


def _extents(count: int) -> list[ExtentId]:
    return [ExtentId(number.to_bytes(16, "big")) for number in range(count)]


def _run(node: Node, event: Event) -> int:
    """Carry out every command at once; the bytes that were fetched from the source."""
    commands = carry_out(node, event)
    assert all(isinstance(each, (StartFill, Evict, Grant)) for each in commands), commands
    return SIZE * sum(isinstance(each, StartFill) and each.from_tier is None for each in commands)


def _epoch(node: Node, order: list[ExtentId], planned: bool) -> float:
    """Read every extent once in this order; the part of the bytes that the source did not serve."""
    fetched = 0
    if planned:
        entries = tuple((extent, step, step) for step, extent in enumerate(order))
        fetched += _run(node, Planned(1, 1, entries))
    for step, extent in enumerate(order):
        fetched += _run(node, Demanded(READER, step, extent, True, SIZE))
        fetched += _run(node, Released(READER, extent))
        if planned:
            fetched += _run(node, Passed(1, step + 1))
    check(node)
    return 1 - fetched / (SIZE * len(order))


def _steady_hit_rate(node: Node, extents: list[ExtentId]) -> float:
    keyed = random.Random(7)
    rates = []
    for _ in range(7):
        order = keyed.sample(extents, len(extents))
        rates.append(_epoch(node, order, planned=False))
    return sum(rates[2:]) / 5


def _node(extents: list[ExtentId], fraction: float) -> Node:
    budget = int(fraction * len(extents)) * SIZE
    return Node([TierSpec(RAM, budget)], NodeSettings(lookahead_bytes=2 * SIZE, max_fills=2))


def test_declared_reads_without_a_plan_reach_the_bound_too() -> None:
    extents = _extents(200)
    node = _node(extents, 0.5)
    node.handle(DatasetDeclared(1, DATASET, tuple((extent, SIZE) for extent in extents)), 0.0)
    assert abs(_steady_hit_rate(node, extents) - 0.5) <= 0.02


def test_a_dataset_that_fits_exactly_is_fetched_once() -> None:
    extents = _extents(50)
    node = _node(extents, 1.0)
    node.handle(DatasetDeclared(1, DATASET, tuple((extent, SIZE) for extent in extents)), 0.0)
    assert _epoch(node, extents, planned=True) == 0.0
    assert _epoch(node, extents[::-1], planned=True) == 1.0
    assert node.counters(DATASET).source_bytes == 50 * SIZE


def test_a_hit_in_a_dataset_of_100_000_extents_costs_microseconds() -> None:
    extents = _extents(100_000)
    node = Node([TierSpec(RAM, 100_000 * SIZE)])
    node.handle(DatasetDeclared(1, DATASET, tuple((extent, SIZE) for extent in extents)), 0.0)
    for extent in extents[:2000]:
        _run(node, Demanded(READER, 0, extent))
        _run(node, Released(READER, extent))
    began = time.thread_time()
    for extent in extents[:2000]:
        node.handle(Demanded(READER, 0, extent), 0.0)
        node.handle(Released(READER, extent), 0.0)
    cost_us = (time.thread_time() - began) / 2000 * 1e6
    print(f"a hit (Demanded and Released) of 100,000 extents: {cost_us:.1f} us")
    assert cost_us < 200
