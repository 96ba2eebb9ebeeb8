"""Builders of nodes and events for tests of the core."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace
from typing import Any

from cachesvc.core.commands import Command, Grant
from cachesvc.core.events import (
    Committed,
    DatasetDeclared,
    Demanded,
    Event,
    Filled,
    Planned,
    Released,
)
from cachesvc.core.model import RAM, DatasetId, ExtentId, Stay, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.node.status import Counters
from cachesvc.core.records.residency import TierState
from cachesvc.core.tiering.copies import UNDECLARED
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from tests.support.core.instant import carry_out
from tests.support.core.invariants import check
from tests.support.core.names import DATASET, NVME, ONE, SIZE


def node_of(
    ram: int | None = None, nvme: int | None = None, lookahead_bytes: int | None = SIZE, **settings: Any
) -> Node:
    """A node with budgets counted in extents of 10 bytes and a window of one extent."""
    specs = [(RAM, ram), (NVME, nvme)]
    tiers = [TierSpec(name, SIZE * count) for name, count in specs if count is not None]
    return Node(tiers, NodeSettings(lookahead_bytes=lookahead_bytes, **settings))


def tell(node: Node, *events: Event, now: float = 0.0) -> list[Command]:
    """Send events; return the commands that followed, in order."""
    out = []
    for event in events:
        out += node.handle(event, now)
        check(node)
    return out


def fill(node: Node, *extents: ExtentId, tier: TierName = RAM) -> list[Command]:
    done: list[Event] = [Filled(extent, tier) for extent in extents]
    if tier != RAM:
        done += [Committed(extent, tier) for extent in extents]
    return tell(node, *done)


def declare(*extents: ExtentId, job: int = 1, dataset: DatasetId = DATASET) -> DatasetDeclared:
    return DatasetDeclared(job, dataset, tuple((extent, SIZE) for extent in extents))


def read(node: Node, *extents: ExtentId) -> list[Stay]:
    """Read extents one by one, filling absent ones; return for each how long the reader may hold it."""
    stays = []
    for extent in extents:
        commands = carry_out(node, Demanded(ONE, 0, extent, True, SIZE))
        stays += [each.stay for each in commands if isinstance(each, Grant)]
        tell(node, Released(ONE, extent))
    return stays


def plan(*extents: ExtentId, number: int = 1, job: int = 1) -> Planned:
    """A plan that reads one extent a step."""
    return Planned(number, job, tuple((extent, step, step) for step, extent in enumerate(extents)))


@dataclass(frozen=True)
class Status:
    """A node at one moment. `queued` counts extents whose readers wait for a slot or for room."""

    tiers: list[Any]
    datasets: list[Counters]
    undeclared: Counters
    fills: int
    queued: int
    plans: int


_ACCOUNTS = [each.name for each in fields(TierState) if each.type in ("int", "float", "bool")]


def status(node: Node) -> Status:
    """The accounts of a node and of its tiers. Those of two nodes can be compared."""
    return Status(
        tiers=[
            SimpleNamespace(**{each: getattr(tier, each) for each in _ACCOUNTS})
            for tier in node.policy.tiers.values()
        ],
        datasets=[node.counters(name) for name in node.policy.shares.datasets],
        undeclared=node.counters(UNDECLARED),
        fills=len(node.copies.filling),
        queued=sum(map(len, [node.readers.queue, *node.readers.prepared.values()])),
        plans=len(node.plans.plans),
    )
