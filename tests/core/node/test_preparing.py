"""Prepared extents: which preparer makes which, when, and that no fill waits for another in a circle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from cachesvc.core.commands import Command, FindCopy, Grant, Refuse, StartFill
from cachesvc.core.events import (
    CopyFound,
    DatasetDeclared,
    Demanded,
    EvictAsked,
    Evicted,
    Filled,
    FillFailed,
    Planned,
    Prefetched,
    PreparerJoined,
    PreparerStalled,
    ReaderGone,
    Released,
    Renewed,
    Tick,
    TierLost,
)
from cachesvc.core.model import RAM, ExtentId, ReaderId
from cachesvc.core.node.node import Node
from tests.support.core.names import DATASET, NVME, ONE, SIZE, TWO, A, B, C, D, E, F
from tests.support.core.node import fill, node_of, status, tell
from tests.support.core.preparing import PreparingMachine

TestPreparing = PreparingMachine.TestCase
TestPreparing.settings = settings(
    max_examples=30,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
FIRST, SECOND = ReaderId(11), ReaderId(12)
STALLED = FillFailed(A, RAM, 11, "no progress", retry=True)


def prepared(*made: ExtentId, sources: tuple[ExtentId, ...], job: int = 1) -> DatasetDeclared:
    """Extents that are prepared from source extents of the same size."""
    extents, made_from = ((each, SIZE) for each in made), ((each, SIZE) for each in sources)
    return DatasetDeclared(job, DATASET, tuple(extents), made_from=tuple(made_from))


def preparing_node(ram: int = 10, preparers: int = 2, **settings: Any) -> Node:
    """A node where A and B are prepared from E, and C and D from F."""
    node = node_of(ram, **settings)
    tell(node, prepared(A, B, C, D, sources=(E, E, F, F)))
    tell(node, *(PreparerJoined(each, DATASET) for each in (FIRST, SECOND)[:preparers]))
    return node


def starts(commands: list[Command]) -> list[tuple[ExtentId, ReaderId | None]]:
    return [(each.extent, each.preparer) for each in commands if isinstance(each, StartFill)]


def test_a_demand_fetches_the_source_extent_then_has_one_preparer_make_it_for_all() -> None:
    node = preparing_node()
    assert starts(tell(node, Demanded(ONE, 1, A), Demanded(TWO, 2, A))) == [(E, None)]
    assert starts(tell(node, Filled(E, RAM))) == [(A, FIRST)]
    assert tell(node, Filled(A, RAM)) == [Grant(ONE, 1, A, RAM, counted="misses"), Grant(TWO, 2, A, RAM)]


def test_an_extent_that_another_node_has_is_fetched_from_there() -> None:
    node = preparing_node(preparers=0, share_prepared=True)
    assert tell(node, Demanded(ONE, 1, A), Demanded(TWO, 2, A)) == [FindCopy(A)]
    assert tell(node, CopyFound(A, True)) == [StartFill(A, RAM)]
    grants = [Grant(ONE, 1, A, RAM, from_peer=True, counted="misses"), Grant(TWO, 2, A, RAM, from_peer=True)]
    assert tell(node, Filled(A, RAM, from_peer=True)) == grants


def test_an_uneven_extent_of_another_node_is_reserved_at_the_most_and_keeps_what_it_takes() -> None:
    node = node_of(10, share_prepared=True)
    tell(node, replace(prepared(A, B, sources=(E, E)), uneven=True), PreparerJoined(FIRST, DATASET))
    assert tell(node, Demanded(ONE, 1, A)) == [FindCopy(A)]
    assert tell(node, CopyFound(A, True)) == [StartFill(A, RAM, size_bytes=SIZE)]
    (grant,) = tell(node, Filled(A, RAM, from_peer=True, size_bytes=SIZE // 4))
    assert grant == Grant(ONE, 1, A, RAM, from_peer=True, counted="misses", size_bytes=SIZE // 4)
    assert node.policy.tiers[RAM].used_bytes == SIZE // 4


def test_an_uneven_copy_that_does_not_come_is_prepared_here() -> None:
    node = node_of(3, share_prepared=True)
    tell(node, replace(prepared(A, B, sources=(E, E)), uneven=True), PreparerJoined(FIRST, DATASET))
    tell(node, Demanded(ONE, 1, A), CopyFound(A, True))
    assert starts(tell(node, FillFailed(A, RAM, 2, "an older node tells no size"))) == [(E, None)]
    assert tell(node, Filled(E, RAM)) == [StartFill(A, RAM, preparer=FIRST, size_bytes=SIZE)]


@pytest.mark.parametrize("found", [False, True], ids=["none has it", "its copy is gone"])
def test_an_extent_that_no_other_node_gives_is_prepared_here(found: bool) -> None:
    node = preparing_node(share_prepared=True)
    tell(node, Demanded(ONE, 1, A))
    commands = tell(node, CopyFound(A, found))
    if found:
        commands = tell(node, FillFailed(A, RAM, 2, "no other node has it"))
    assert starts(commands) == [(E, None)]
    assert starts(tell(node, Filled(E, RAM))) == [(A, FIRST)]


def test_a_plan_has_source_extents_there_before_a_preparer_is_idle() -> None:
    node = preparing_node(preparers=1)
    plan = tuple((extent, step, step) for step, extent in enumerate((A, C)))
    assert starts(tell(node, Planned(1, 1, plan))) == [(E, None)]
    assert starts(tell(node, Filled(E, RAM))) == [(A, FIRST), (F, None)]
    assert starts(tell(node, Filled(F, RAM))) == []
    assert starts(tell(node, Filled(A, RAM))) == [(C, FIRST)]


def test_slots_are_the_nodes_not_each_preparers() -> None:
    node = preparing_node(preparing=1)
    tell(node, Demanded(ONE, 1, A), Demanded(TWO, 2, B))
    assert starts(tell(node, Filled(E, RAM))) == [(A, FIRST)]
    assert starts(tell(node, Filled(A, RAM))) == [(B, SECOND)]


def test_an_extent_of_a_preparer_without_progress_goes_to_another_one() -> None:
    node = preparing_node()
    tell(node, Demanded(ONE, 1, A), Filled(E, RAM))
    assert starts(tell(node, PreparerStalled(FIRST), STALLED)) == []
    assert starts(tell(node, Tick(), now=60.0)) == [(A, SECOND)]


@pytest.mark.parametrize("joined", [0, 1])
def test_without_a_preparer_readers_prepare_for_themselves(joined: int) -> None:
    node = preparing_node(preparers=joined)
    commands = tell(node, Demanded(ONE, 1, A))
    if joined:
        commands = tell(node, ReaderGone(FIRST))
    assert Refuse(ONE, 1, A) in commands


def test_readers_prepare_for_themselves_what_a_preparer_cannot_make() -> None:
    node = preparing_node(preparers=1, max_attempts=1)
    tell(node, Demanded(ONE, 1, A), Filled(E, RAM))
    assert tell(node, FillFailed(A, RAM, 1, "an odd error", retry=True)) == [Refuse(ONE, 1, A)]


def test_readers_of_a_source_extent_that_fails_are_told_to_read_it_themselves() -> None:
    node = preparing_node()
    tell(node, Demanded(ONE, 1, A))
    assert tell(node, FillFailed(E, RAM, 6, "it has changed")) == [Refuse(ONE, 1, A)]


def test_a_source_extent_is_not_evicted_before_its_prepared_extent_is_done() -> None:
    node = preparing_node(ram=2)
    tell(node, Demanded(ONE, 1, A))
    assert starts(tell(node, Filled(E, RAM))) == [(A, FIRST)]
    assert tell(node, Demanded(TWO, 2, C)) == []  # F waits for the room of E
    assert starts(tell(node, Filled(A, RAM), Released(ONE, A))) == []
    assert node.where(A) == RAM


def test_a_prefetch_of_a_prepared_dataset_does_not_hold_back_another() -> None:
    node = preparing_node(ram=12, preparers=1)
    other = DatasetDeclared(2, "plain", ((ExtentId(b"p" * 16), SIZE),))  # type: ignore[arg-type]
    tell(node, other, Prefetched(1, DATASET))
    tell(node, Filled(E, RAM))
    assert (ExtentId(b"p" * 16), None) in starts(tell(node, Prefetched(2, other.dataset)))


def test_a_prefetch_prepares_all_of_its_dataset() -> None:
    node = preparing_node(ram=12)
    tell(node, Prefetched(1, DATASET))
    for extents in ((E,), (A, B), (F,), (C, D)):
        fill(node, *extents)
    assert node.progress(1).resident_extents == 4


def test_a_source_extent_of_a_prepared_dataset_is_of_no_claim() -> None:
    node = preparing_node(ram=12)
    tell(node, Demanded(ONE, 1, A), Filled(E, RAM), Filled(A, RAM))
    assert node.counters(DATASET).kept_bytes == SIZE
    assert status(node).tiers[0].used_bytes == 2 * SIZE


def test_an_uneven_extent_takes_what_it_turned_out_to_take() -> None:
    node = node_of(3)
    claim = prepared(A, B, sources=(E, E))
    tell(node, replace(claim, uneven=True), PreparerJoined(FIRST, DATASET))
    assert starts(tell(node, Demanded(ONE, 1, A))) == [(E, None)]
    assert [each.size_bytes for each in tell(node, Filled(E, RAM)) if isinstance(each, StartFill)] == [SIZE]
    (grant,) = tell(node, Filled(A, RAM, size_bytes=SIZE // 4))
    assert isinstance(grant, Grant)
    assert grant.size_bytes == SIZE // 4
    assert status(node).tiers[0].used_bytes == SIZE + SIZE // 4
    assert node.progress(1).total_bytes == SIZE + SIZE // 4
    tell(node, Released(ONE, A), EvictAsked(DATASET), Evicted(A, RAM))
    (fill,) = tell(node, Demanded(ONE, 2, A))
    assert isinstance(fill, StartFill)
    assert fill.size_bytes == SIZE // 4, "known from the first time"
    tell(node, FillFailed(A, RAM, 1, "it is larger", retry=True))
    (fill,) = tell(node, Tick(), now=60.0)
    assert isinstance(fill, StartFill)
    assert fill.size_bytes == SIZE


def test_an_uneven_extent_of_a_renewed_directory_has_the_size_of_its_file() -> None:
    node = node_of(ram=3, nvme=10)
    tell(node, replace(prepared(A, B, sources=(E, E)), uneven=True), TierLost(NVME))
    tell(node, Renewed(NVME, {A: SIZE // 4}))
    assert node.size_of(A) == SIZE // 4
    assert status(node).tiers[1].used_bytes == SIZE // 4
