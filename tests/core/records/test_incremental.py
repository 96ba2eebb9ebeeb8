"""Incremental work on a large dataset has the result of a single step, whatever comes between two steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest

from cachesvc.core.commands import Command, Evict, Grant, StartFill
from cachesvc.core.events import (
    DatasetDeclared,
    Demanded,
    EvictAsked,
    Evicted,
    JobEnded,
    Passed,
    Pinned,
    PlanEnded,
    Planned,
    Prefetched,
    Recovered,
    Released,
    Tick,
    Unpinned,
)
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.node.node import Node
from cachesvc.core.records.incremental import IncrementalWork, WorkKind
from tests.support.core.names import DATASET, ONE, OTHER, SIZE
from tests.support.core.node import declare, node_of, status, tell

EXTENTS = [ExtentId(bytes([number]) * 16) for number in range(10)]


def claimed(
    ram: int, claim_step: int, extents: Sequence[ExtentId] = EXTENTS, resident: int = 10, ahead: int = 2
) -> Node:
    """A node with a declared dataset that is partly resident. Room is counted in extents."""
    node = node_of(ram, lookahead_bytes=ahead * SIZE, claim_step=claim_step)
    tell(node, Recovered(RAM, dict.fromkeys(extents[:resident], SIZE)), declare(*extents))
    return node


def to_the_end(node: Node) -> list[Command]:
    """Do all steps that are left; their commands."""
    out = []
    while node.work:
        assert node.next_deadline() == 0.0
        out += tell(node, Tick())
    return out


def listed(node: Node) -> int:
    """The number of copies on eviction lists."""
    return sum(
        copy.eviction_list is not None for entry in node.copies.entries.values() for copy in entry.copies
    )


def test_a_pin_and_its_end_in_steps_have_the_result_of_a_single_step() -> None:
    at_once, node = claimed(10, 100), claimed(10, 3)
    tell(at_once, Pinned(DATASET))
    tell(node, Pinned(DATASET, gradual=True))
    assert not node.claims.settled(DATASET)
    assert listed(node) == 10
    tell(node, Tick())
    assert listed(node) == 7, "three extents a step"
    to_the_end(node)
    assert node.claims.settled(DATASET)
    assert (status(node), listed(node)) == (status(at_once), 0)
    tell(node, Unpinned(DATASET), Tick())
    assert listed(node) == 3
    to_the_end(node)
    assert listed(node) == 10


def test_a_pin_that_is_not_gradual_is_done_at_once_during_a_claim() -> None:
    node = claimed(10, 3)
    claim = DatasetDeclared(1, OTHER, tuple((extent, SIZE) for extent in EXTENTS), gradual=True)
    tell(node, JobEnded(1))
    to_the_end(node)
    tell(node, claim, Pinned(OTHER))
    assert node.claims.settled(OTHER)
    assert listed(node) == 0


def test_a_pin_during_a_claim_or_an_unpin_pins_everything() -> None:
    node = claimed(10, 3)
    claim = DatasetDeclared(7, DATASET, tuple((extent, SIZE) for extent in EXTENTS), gradual=True)
    tell(node, JobEnded(1), Tick(), claim, Pinned(DATASET, gradual=True), Tick())
    to_the_end(node)
    assert listed(node) == 0
    tell(node, Unpinned(DATASET), Tick(), Tick(), Pinned(DATASET, gradual=True), Tick())
    to_the_end(node)
    assert listed(node) == 0
    tell(node, Unpinned(DATASET), JobEnded(7))
    to_the_end(node)
    assert status(node).datasets == []
    assert status(node).tiers[0].kept_bytes == 0


def test_an_eviction_in_steps_leaves_extents_that_are_read_or_pinned_meanwhile() -> None:
    node = claimed(10, 3)
    early = tell(node, EvictAsked(DATASET))
    assert not node.claims.evicted(DATASET)
    early += tell(node, Tick())
    assert early == [Evict(extent, RAM) for extent in EXTENTS[:3]]
    assert tell(node, Demanded(ONE, 1, EXTENTS[5])) == [Grant(ONE, 1, EXTENTS[5], RAM)]
    assert tell(node, Tick()) == [Evict(EXTENTS[3], RAM), Evict(EXTENTS[4], RAM)]
    tell(node, Pinned(DATASET, gradual=True))
    assert to_the_end(node) == []
    assert node.claims.evicted(DATASET)
    assert node.resident_in(RAM) == set(EXTENTS[5:])
    tell(node, Released(ONE, EXTENTS[5]), EvictAsked(DATASET))
    assert to_the_end(node) == [], "pinned"


def test_an_eviction_of_an_undeclared_dataset_takes_steps_and_a_second_begins_anew() -> None:
    node = claimed(10, 3)
    tell(node, JobEnded(1))
    to_the_end(node)
    tell(node, Demanded(ONE, 1, EXTENTS[0]), EvictAsked(DATASET, tuple(EXTENTS)), Tick())
    tell(node, Released(ONE, EXTENTS[0]), EvictAsked(DATASET, tuple(EXTENTS)))
    to_the_end(node)
    assert node.resident_in(RAM) == set()


def test_a_prefetch_waits_for_the_end_of_an_eviction() -> None:
    node = claimed(10, 3)
    assert tell(node, EvictAsked(DATASET), Prefetched(1, DATASET)) == []
    evictions = tell(node, Tick(), Tick(), Tick(), Tick())
    assert evictions == [Evict(extent, RAM) for extent in EXTENTS]
    assert not node.progress(1).finished
    fills = tell(node, Tick(), *(Evicted(extent, RAM) for extent in EXTENTS))
    assert [StartFill(extent, RAM) for extent in EXTENTS[:8]] == fills, "as many as there are slots"


def test_a_long_plan_is_scheduled_in_steps_and_enters_nothing_before() -> None:
    many = [ExtentId(number.to_bytes(16, "little")) for number in range(400)]
    order = random.Random(3).sample(many, len(many))
    entries = tuple((extent, step // 4, step // 4 + 8) for step, extent in enumerate(order))
    event = Planned(2, 1, entries, tuple(reversed(order + order[:9])))
    at_once, node = (claimed(200, step, many, resident=100, ahead=80) for step in (1000, 30))
    fills = tell(at_once, event)
    absent = next(extent for extent in reversed(order) if extent not in node.resident_in(RAM))
    assert fills
    assert tell(node, event) == []
    assert tell(node, Demanded(ONE, 1, absent)) == [StartFill(absent, RAM)], "a reader waits for no schedule"
    assert node.plans.plans[2].entered == []
    assert to_the_end(node) == fills
    assert node.policy.reserve.open_bytes == at_once.policy.reserve.open_bytes == 9 * 4 * SIZE
    for each in (node, at_once):
        retention = each.plans.plans[2].window.retention
        assert retention is not None
        assert [retention.stretch(extent) for extent in dict.fromkeys(event.following)] == [
            rank // 4 for rank in range(len(many))
        ]


def test_a_plan_that_is_replaced_or_ends_while_it_is_scheduled_leaves_nothing() -> None:
    node = claimed(5, 3, resident=4)
    entries = tuple((extent, step, step) for step, extent in enumerate(EXTENTS))
    tell(node, Planned(2, 1, entries), Tick(), Planned(2, 1, entries[::-1]), Tick(), Passed(2, 2))
    to_the_end(node)
    assert node.plans.plans[2].paced
    tell(node, Planned(2, 1, entries), Tick(), PlanEnded(2))
    to_the_end(node)
    assert not node.plans.plans
    assert not node.plans.ending
    assert all(not entry.needs for entry in node.copies.entries.values())


def test_the_end_of_a_long_plan_gives_up_its_window_in_steps() -> None:
    node = claimed(20, 3, ahead=10)
    tell(node, Planned(2, 1, tuple((extent, 0, 5) for extent in EXTENTS)))
    to_the_end(node)

    def needed() -> int:
        return sum(entry.needs for entry in node.copies.entries.values())

    before = needed()
    tell(node, PlanEnded(2))
    assert status(node).plans == 0
    tell(node, Tick())
    assert 0 < needed() == before - 3
    to_the_end(node)
    assert needed() == 0


def at_mid_plan(claim_step: int, ahead: int) -> Node:
    """A node on which all is resident, and a plan of one extent a step with a window of `ahead` jumps to its eighth
    step."""
    node = claimed(10, claim_step, ahead=ahead)
    tell(node, Planned(1, 1, tuple((extent, step, step) for step, extent in enumerate(EXTENTS))))
    tell(node, Passed(1, 8))
    return node


def needed(node: Node) -> set[ExtentId]:
    """The extents that plans protect."""
    return {entry.id for entry in node.copies.entries.values() if entry.needs}


def touched(node: Node) -> list[tuple[int, int]]:
    """The touched extents and hits of each epoch."""
    return [(each.touched, each.hits) for each in node.counters(DATASET).epochs]


@pytest.mark.parametrize("ahead", [1, 6], ids=["before the window", "in the window"])
def test_a_cursor_that_moves_far_takes_steps_and_has_the_result_of_a_single_step(ahead: int) -> None:
    at_once, node = at_mid_plan(100, ahead), at_mid_plan(3, ahead)
    assert touched(node) == [(3, 3)], "three extents a step"
    assert not needed(node) & {EXTENTS[8], EXTENTS[9]}, "entered before what was passed is left"
    to_the_end(node)
    assert touched(node) == touched(at_once) == [(8, 8)]
    assert needed(node) == needed(at_once)
    assert EXTENTS[8] in needed(node)


def test_a_cursor_that_moves_on_during_the_steps_is_followed_to_its_end() -> None:
    node = at_mid_plan(2, 6)
    tell(node, Tick(), Passed(1, 9))
    to_the_end(node)
    assert touched(node) == [(9, 9)]
    assert needed(node) == {EXTENTS[9]}
    tell(node, Passed(1, 1 << 60))
    to_the_end(node)
    assert touched(node) == [(10, 10)]
    assert not needed(node)


@pytest.mark.parametrize("another", [False, True], ids=["ended", "replaced"])
def test_a_plan_that_ends_during_the_steps_has_its_epoch_counted_in_full(another: bool) -> None:
    node = at_mid_plan(3, 6)
    tell(node, Planned(1, 1, ((EXTENTS[0], 0, 0),)) if another else PlanEnded(1))
    to_the_end(node)
    assert touched(node)[0] == (8, 8)
    assert needed(node) == ({EXTENTS[0]} if another else set())
    assert not node.plans.ending


def test_neither_an_opening_nor_a_short_plan_waits_for_long_plans() -> None:
    queue, done = IncrementalWork(1), list[str]()

    def work(name: str, count: int) -> Iterator[None]:
        for _ in range(count):
            done.append(name)
            yield

    queue.begin((WorkKind.PACE, 1), work("long", 9))
    queue.begin((WorkKind.END, 2), work("longer", 9))
    queue.begin((WorkKind.PASS, 3), work("short", 1))
    for _ in range(2):
        queue.advance()
    queue.begin((WorkKind.CLAIM, "first"), work("opening", 2))
    queue.begin((WorkKind.PIN, "second"), work("another", 1))
    for _ in range(8):
        queue.advance()
    assert done[:5] == ["long", "longer", "opening", "short", "opening"]
    assert done.index("another") < 9
    while queue:
        queue.advance()
    assert [done.count(name) for name in ("long", "longer", "short", "opening", "another")] == [9, 9, 1, 2, 1]
