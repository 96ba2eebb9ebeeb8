"""The share of the cache for readers without a plan, which is LRU in itself."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import islice

import pytest

from cachesvc.core.commands import StartFill
from cachesvc.core.events import (
    DatasetDeclared,
    Demanded,
    Event,
    HoldReported,
    JobEnded,
    Passed,
    Pinned,
    Planned,
    Prefetched,
    Released,
)
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.core.tiering.stream_window import WINDOW_EXTENTS
from tests.support.core.instant import carry_out
from tests.support.core.invariants import check

SIZE = 10
CAPACITY = 100
TRAINED = [ExtentId(bytes([0, number]) * 8) for number in range(200)]
LOOKED_AT = [ExtentId(bytes([1, number]) * 8) for number in range(240)]
TRAINER, VISITOR = ReaderId(1), ReaderId(2)


class Served:
    """A node whose fills and evictions are done at once; `fills` counts the fills of each extent."""

    def __init__(self, share: float, node: Node | None = None) -> None:
        self.node = node or Node([TierSpec(RAM, CAPACITY * SIZE)], NodeSettings(unplanned_share=share))
        self.fills: Counter[ExtentId] = Counter()
        self._now = 0.0

    def tell(self, *events: Event) -> None:
        self._now += 0.001
        commands = carry_out(self.node, *events, now=self._now)
        self.fills.update(each.extent for each in commands if isinstance(each, StartFill))

    def declare(self, reader: ReaderId, extents: Iterable[ExtentId]) -> None:
        rows = tuple((extent, SIZE) for extent in extents)
        self.tell(DatasetDeclared(reader, DatasetId(f"of {reader}"), rows))

    def kept(self, extent: ExtentId) -> bool:
        entry = self.node.copies.entries.get(extent)
        return entry is not None and entry.kept

    def read(self, reader: ReaderId, extent: ExtentId) -> bool:
        """Read an extent; whether it was resident."""
        before = self.fills[extent]
        self.tell(Demanded(reader, 1, extent, True, SIZE))
        self.tell(Released(reader, extent))
        return self.fills[extent] == before

    def train(self, chance: random.Random, between: Iterable[ExtentId] = ()) -> tuple[int, int]:
        """Run an epoch of a shuffled plan, with reads of the visitor between its steps; the hits of both."""
        order = chance.sample(TRAINED, len(TRAINED))
        visits = iter(between)
        self.tell(Planned(1, 1, tuple((extent, step, step) for step, extent in enumerate(order))))
        trained = visited = 0
        for step, extent in enumerate(order):
            trained += self.read(TRAINER, extent)
            self.tell(Passed(1, step + 1))
            visited += sum(self.read(VISITOR, each) for each in islice(visits, 2))
        check(self.node)
        return trained, visited


def visits(chance: random.Random) -> list[ExtentId]:
    """A hundred reads of five extents in any order, then of five others: all but the first of each could hit."""
    parts = [LOOKED_AT[start : start + 5] for start in range(0, len(LOOKED_AT), 5)]
    return [chance.choice(part) for part in parts for _ in range(100)]


@pytest.mark.parametrize(("share", "least", "most"), [(0.0, 0.0, 0.5), (0.05, 0.95, 0.95)])
def test_extents_read_again_without_a_plan_stay_beside_a_job_that_streams(
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
        hits += visited if epoch >= 3 else 0  # earlier, its extents are still kept copies of its share
    assert least <= hits / (len(reads) - 3 * 400) <= most


@pytest.mark.parametrize(("plans", "span"), [(1, 5), (1, 40), (4, 5), (4, 20)])
@pytest.mark.parametrize("users", [1, 4])
def test_plans_that_read_much_side_by_side_leave_the_share_alone(plans: int, span: int, users: int) -> None:
    """Ranks ahead of their look-ahead demand rows that are not entered: these are not reads without a plan."""
    served, chance = Served(0.1), random.Random(4)
    served.declare(TRAINER, TRAINED)
    orders = {}
    for rank in range(plans):
        order = orders[ReaderId(10 + rank)] = chance.sample(TRAINED, len(TRAINED))
        rows = tuple((extent, step, step + span) for step, extent in enumerate(order))
        served.tell(Planned(10 + rank, TRAINER, rows, user=rank % users))
    missed = 0
    for step in range(len(TRAINED)):
        for reader, order in orders.items():
            served.read(reader, order[step])
            served.read(reader, order[max(0, step - chance.randrange(span + 1))])
            served.tell(Passed(reader, max(0, step + 1 - span)))
        missed += not served.read(VISITOR, LOOKED_AT[step % 5])
    check(served.node)
    assert missed == 5


@pytest.mark.parametrize(("share", "left"), [(0.0, 0), (0.1, 10)])
def test_extents_that_a_job_without_a_plan_used_last_are_there_when_it_comes_back(
    share: float, left: int
) -> None:
    served, chance = Served(share), random.Random(7)
    served.declare(VISITOR, LOOKED_AT)
    used = chance.sample(LOOKED_AT, len(LOOKED_AT))
    for extent in used:
        served.read(VISITOR, extent)
    streamed = [extent for extent in used if not served.kept(extent)]
    served.tell(JobEnded(VISITOR))
    served.declare(TRAINER, TRAINED)
    for _ in range(3):
        served.train(chance)
    still = {extent for extent in LOOKED_AT if served.node.where(extent) is not None}
    assert len(still) <= left + WINDOW_EXTENTS, "what the window did not need may be left too"
    assert still >= set(streamed[len(streamed) - left :])


def test_a_job_that_ends_takes_nothing_from_readers_that_go_on() -> None:
    served, ended = Served(0.1), ReaderId(3)
    served.declare(ended, TRAINED[100:])
    for extent in TRAINED[100:160]:
        served.read(ended, extent)
    served.declare(TRAINER, TRAINED)
    for extent in LOOKED_AT[:8] * 3:
        served.read(VISITOR, extent)
    served.tell(JobEnded(ended))
    served.train(random.Random(2))
    assert all(served.node.where(extent) is not None for extent in LOOKED_AT[:8])


@pytest.mark.parametrize("taken", ["held", "pinned"])
def test_the_share_is_a_part_of_what_is_neither_held_nor_pinned(taken: str) -> None:
    """The look-ahead of a plan goes on beside memory that is held or pinned."""
    served, other = Served(0.4), ReaderId(3)
    if taken == "held":
        for extent in LOOKED_AT[100:170]:
            served.tell(HoldReported(other, extent, SIZE))
    else:
        served.declare(other, LOOKED_AT[100:170])
        served.tell(Pinned(DatasetId(f"of {other}")), Prefetched(other, DatasetId(f"of {other}")))
    for extent in LOOKED_AT[:60]:
        served.read(VISITOR, extent)
    served.declare(TRAINER, TRAINED)
    hits, _ = served.train(random.Random(1))
    assert hits >= len(TRAINED) - WINDOW_EXTENTS


def test_a_reader_without_other_room_takes_from_the_share() -> None:
    tiny = Node([TierSpec(RAM, 4 * SIZE)], NodeSettings(unplanned_share=0.5))
    served = Served(0.5, tiny)
    for extent in LOOKED_AT[:2]:
        served.read(VISITOR, extent)
    for extent in LOOKED_AT[2:4]:
        served.tell(Demanded(VISITOR, 1, extent, True, SIZE))  # and not released
    served.tell(Planned(1, 1, ((TRAINED[0], 0, 0),)))
    assert not served.read(TRAINER, TRAINED[0])
    assert served.fills[TRAINED[0]] == 1


def test_the_share_costs_a_planned_job_no_more_hits_than_its_size() -> None:
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
def test_a_dataset_that_fits_beside_the_share_is_kept_whole_without_a_window(share: float) -> None:
    served = Served(share)
    whole = TRAINED[: round(CAPACITY * (1 - share))]
    served.declare(TRAINER, whole)
    for extent in whole:
        served.read(TRAINER, extent)
    assert all(served.read(TRAINER, extent) for extent in whole)
    assert not served.node.policy.reserve.streams
