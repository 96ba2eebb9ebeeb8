"""The part of the cache that claims and plans leave to what is read without a plan, least recently used last."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from itertools import islice

import pytest

from cachesvc.core.events import (
    DatasetDeclared,
    Demanded,
    Event,
    Evict,
    Evicted,
    Filled,
    JobEnded,
    Passed,
    Planned,
    Released,
    StartFill,
)
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.node import Node
from cachesvc.core.policy import Settings, TierSpec
from cachesvc.core.reserve import WINDOW_EXTENTS

SIZE = 10
CAPACITY = 100
TRAINED = [ExtentId(bytes([0, number]) * 8) for number in range(200)]
LOOKED_AT = [ExtentId(bytes([1, number]) * 8) for number in range(240)]
TRAINER, VISITOR = ReaderId(1), ReaderId(2)


class Served:
    """A node whose fills and evictions are done at once; `fills` counts each extent's."""

    def __init__(self, share: float) -> None:
        self.node = Node([TierSpec(RAM, CAPACITY * SIZE)], Settings(unplanned_share=share))
        self.fills: Counter[ExtentId] = Counter()
        self._now = 0.0

    def tell(self, *events: Event) -> None:
        todo = deque(events)
        while todo:
            self._now += 0.001
            for command in self.node.handle(todo.popleft(), self._now):
                if isinstance(command, StartFill):
                    self.fills[command.extent] += 1
                    todo.append(Filled(command.extent, command.tier))
                elif isinstance(command, Evict):
                    todo.append(Evicted(command.extent, command.tier))

    def declare(self, reader: ReaderId, extents: Iterable[ExtentId]) -> None:
        rows = tuple((extent, SIZE) for extent in extents)
        self.tell(DatasetDeclared(reader, DatasetId(f"of {reader}"), rows))

    def read(self, reader: ReaderId, extent: ExtentId) -> bool:
        """Whether it was there."""
        before = self.fills[extent]
        self.tell(Demanded(reader, 1, extent, True, SIZE))
        self.tell(Released(reader, extent))
        return self.fills[extent] == before

    def train(self, chance: random.Random, between: Iterable[ExtentId] = ()) -> tuple[int, int]:
        """An epoch of a shuffled plan, with reads by the visitor between its steps; the hits of either."""
        order = chance.sample(TRAINED, len(TRAINED))
        visits = iter(between)
        self.tell(Planned(1, 1, tuple((extent, step, step) for step, extent in enumerate(order))))
        trained = visited = 0
        for step, extent in enumerate(order):
            trained += self.read(TRAINER, extent)
            self.tell(Passed(1, step + 1))
            visited += sum(self.read(VISITOR, each) for each in islice(visits, 2))
        self.node.check()
        return trained, visited


def visits(chance: random.Random) -> list[ExtentId]:
    """A hundred reads of five extents in any order, then of five others: all but the first of each could hit."""
    parts = [LOOKED_AT[start : start + 5] for start in range(0, len(LOOKED_AT), 5)]
    return [chance.choice(part) for part in parts for _ in range(100)]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.0, 0.5), (0.05, 0.95, 0.95)])
def test_what_is_read_again_without_a_plan_stays_beside_a_job_that_streams(
    share: float, least: float, most: float
) -> None:
    chance = random.Random(5)
    served = Served(share)
    served.declare(TRAINER, TRAINED)
    served.declare(VISITOR, LOOKED_AT)
    reads = visits(chance)
    hits = 0
    for epoch in range(len(reads) // 400):
        _, visited = served.train(chance, reads[epoch * 400 : (epoch + 1) * 400])
        hits += visited if epoch >= 3 else 0  # until then it is kept of its share of the cache
    assert least <= hits / (len(reads) - 3 * 400) <= most


@pytest.mark.parametrize(("share", "left"), [(0.0, 0), (0.1, 10)])
def test_what_an_ended_job_used_last_is_there_when_it_comes_back(share: float, left: int) -> None:
    served = Served(share)
    served.declare(VISITOR, LOOKED_AT)
    for extent in LOOKED_AT:
        served.read(VISITOR, extent)
    used = [extent for extent in LOOKED_AT if served.node.where(extent) is not None]
    served.tell(JobEnded(VISITOR))
    served.declare(TRAINER, TRAINED)
    for seed in range(3):
        served.train(random.Random(seed))
    still = [extent for extent in LOOKED_AT if served.node.where(extent) is not None]
    assert left <= len(still) <= left + WINDOW_EXTENTS, "what the window did not need may be left too"
    assert still == used[len(used) - len(still) :]


def test_it_costs_a_planned_job_no_more_hits_than_it_holds() -> None:
    def hits(share: float) -> int:
        served, chance = Served(share), random.Random(3)
        served.declare(TRAINER, TRAINED)
        served.train(chance)
        before = sum(served.fills.values())
        for _ in range(4):
            served.train(chance)
        return 4 * len(TRAINED) - (sum(served.fills.values()) - before)

    assert hits(0.0) - hits(0.1) <= 4 * 0.1 * CAPACITY


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_what_fits_beside_it_is_kept_whole_and_without_a_window(share: float) -> None:
    served = Served(share)
    whole = TRAINED[: round(CAPACITY * (1 - share))]
    served.declare(TRAINER, whole)
    for extent in whole:
        served.read(TRAINER, extent)
    assert all(served.read(TRAINER, extent) for extent in whole)
    assert not served.node.policy.reserve.streams
