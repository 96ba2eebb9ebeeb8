"""Tiers that recover extents, are full, stall, are lost, or come back."""

from __future__ import annotations

import pytest

from cachesvc.core.commands import Evict, Grant, Refuse, StartFill
from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.events import (
    Committed,
    DatasetDeclared,
    Demanded,
    EvictAsked,
    Evicted,
    Filled,
    FillFailed,
    Passed,
    Pinned,
    Prefetched,
    ReaderGone,
    Recovered,
    Released,
    Stalled,
    TierBack,
    TierLost,
)
from cachesvc.core.model import RAM, ExtentId, ReaderId
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from tests.support.core.names import DATASET, NVME, NVME1, ONE, OTHER, SIZE, THREE, TWO, A, B, C, D, E
from tests.support.core.node import declare, fill, node_of, plan, read, status, tell


def test_a_full_tier_sends_the_fill_to_another_one_and_is_tried_again_later() -> None:
    node = node_of(ram=2, nvme=1)
    tell(node, declare(A, B, C), Demanded(ONE, 1, A))
    assert tell(node, FillFailed(A, RAM, OutOfSpace.code, "full")) == [StartFill(A, NVME)]
    tell(node, Filled(A, NVME))
    assert tell(node, Demanded(ONE, 2, B)) == [Refuse(ONE, 2, B)]
    assert tell(node, Demanded(ONE, 3, C), now=60.0) == [StartFill(C, RAM)]


def test_a_full_disk_refuses_more_extents_and_keeps_those_it_has() -> None:
    node = node_of(nvme=3)
    tell(node, declare(A, B), Demanded(ONE, 1, A), Filled(A, NVME), Committed(A, NVME))
    assert tell(node, Demanded(ONE, 2, B)) == [StartFill(B, NVME)]
    assert tell(node, FillFailed(B, NVME, OutOfSpace.code, "full")) == [Refuse(ONE, 2, B)]
    assert tell(node, Demanded(TWO, 3, A)) == [Grant(TWO, 3, A, NVME)]


def test_ram_fills_first_then_the_emptiest_nvme() -> None:
    node = Node([TierSpec(RAM, SIZE), TierSpec(NVME, 2 * SIZE), TierSpec(NVME1, 4 * SIZE)])
    started = tell(node, declare(A, B, C, D), Prefetched(1, DATASET))
    assert started == [StartFill(A, RAM), StartFill(B, NVME), StartFill(C, NVME1), StartFill(D, NVME1)]


def test_recovered_extents_are_granted_and_those_beyond_the_budget_evicted() -> None:
    node = node_of(nvme=2)
    assert tell(node, Recovered(NVME, {A: SIZE, B: SIZE, C: SIZE})) == [Evict(A, NVME)]
    tell(node, Evicted(A, NVME))
    assert tell(node, Demanded(ONE, 1, B)) == [Grant(ONE, 1, B, NVME, "brief")]


def test_dormant_extents_have_no_records_until_they_are_named_and_are_evicted_first() -> None:
    node = node_of(nvme=4)
    tell(node, Recovered(NVME, {A: SIZE, B: SIZE, C: SIZE}))
    assert [node.where(each) for each in (A, B, C, D)] == [NVME, NVME, NVME, None]
    assert not node.copies.entries
    assert status(node).tiers[0].used_bytes == 3 * SIZE
    tell(node, Demanded(ONE, 1, C), Released(ONE, C))
    assert set(node.copies.entries) == {C}
    assert tell(node, Demanded(ONE, 2, D, True, SIZE)) == [StartFill(D, NVME)]
    assert tell(node, Demanded(ONE, 3, E, True, SIZE)) == [Evict(A, NVME)], "before what was used since"
    assert set(node.copies.entries) == {A, C, D, E}
    tell(node, TierLost(NVME))
    assert node.where(B) is None


def test_an_extent_recovered_in_two_tiers_has_two_copies() -> None:
    node = node_of(nvme=4, ram=4)
    tell(node, Recovered(NVME, {A: SIZE}), Recovered(RAM, {A: SIZE}))
    assert tell(node, EvictAsked(DATASET, (A,))) == [Evict(A, RAM), Evict(A, NVME)]


def test_two_disks_bring_the_same_extent_and_the_first_has_no_room_for_it_any_more() -> None:
    node = Node([TierSpec(NVME, SIZE), TierSpec(NVME1, 2 * SIZE)], NodeSettings())
    assert tell(node, Recovered(NVME, {A: SIZE, B: SIZE})) == [Evict(A, NVME)]
    tell(node, Recovered(NVME1, {A: SIZE, C: SIZE}))
    assert tell(node, Demanded(ONE, 1, A)) == [Grant(ONE, 1, A, NVME1, "brief")]
    tell(node, Evicted(A, NVME))
    assert node.resident_in(NVME1) == {A, C}


def test_a_lost_tier_is_neither_filled_nor_granted_from_until_it_is_back() -> None:
    node = node_of(ram=2, nvme=2)
    read(node, A)
    tell(node, TierLost(RAM))
    assert tell(node, Demanded(ONE, 1, A)) == [StartFill(A, NVME)]
    tell(node, Filled(A, NVME), Committed(A, NVME), TierBack(RAM))
    assert node.where(A) is not None


def test_nothing_is_filled_into_a_tier_that_stalls_until_it_answers() -> None:
    node = node_of(ram=1, nvme=4)
    tell(node, Demanded(ONE, 1, A, True, SIZE), Demanded(ONE, 2, B, True, SIZE))
    fill(node, A)
    assert tell(node, Stalled(NVME, True)) == []
    answers = tell(node, FillFailed(B, NVME, TierFailed.code, "it does not answer", True))
    assert answers == [Refuse(ONE, 2, B)], "RAM is in use"
    tell(node, Released(ONE, A))
    assert tell(node, Demanded(ONE, 3, C, True, SIZE)) == [Evict(A, RAM)], "not into the free room of a disk"
    assert tell(node, Evicted(A, RAM)) == [StartFill(C, RAM)]
    fill(node, C)
    tell(node, Stalled(NVME, False))
    assert tell(node, Demanded(ONE, 4, D, True, SIZE)) == [StartFill(D, NVME)], "its room is what it was"


@pytest.mark.parametrize("stalls", [False, True])
@pytest.mark.parametrize("coming", ["an eviction", "a fill that nobody waits for"])
def test_readers_do_not_wait_for_room_in_a_tier_that_stalls(coming: str, stalls: bool) -> None:
    node = node_of(ram=1, nvme=1)
    tell(node, Demanded(ONE, 1, A, True, SIZE))
    fill(node, A)
    assert tell(node, Demanded(TWO, 2, B, True, SIZE)) == [StartFill(B, NVME)]
    if coming == "an eviction":
        fill(node, B, tier=NVME)
        tell(node, Released(TWO, B))
        assert tell(node, Demanded(TWO, 3, D, True, SIZE)) == [Evict(B, NVME)]
    tell(node, ReaderGone(TWO), *[Stalled(NVME, True)] * stalls)
    assert tell(node, Demanded(THREE, 4, C, True, SIZE)) == [Refuse(THREE, 4, C)] * stalls


def test_a_prefetch_waits_for_a_tier_that_stalls_and_not_for_a_lost_one() -> None:
    node = node_of(nvme=4)
    tell(node, declare(A, B), Stalled(NVME, True))
    assert tell(node, Prefetched(1, DATASET)) == []
    assert not node.progress(1).finished
    assert tell(node, Stalled(NVME, False)) == [StartFill(A, NVME), StartFill(B, NVME)]
    tell(node, Stalled(NVME, True), TierLost(NVME))
    for extent in (A, B):
        tell(node, FillFailed(extent, NVME, TierFailed.code, "lost", True))
    assert node.progress(1).finished


def test_nothing_is_promoted_from_a_tier_that_stalls() -> None:
    node = node_of(ram=2, nvme=4, lookahead_bytes=None)
    tell(node, Recovered(NVME, {A: SIZE, B: SIZE}), declare(A, B), Stalled(NVME, True))
    assert tell(node, plan(A, B)) == []


def test_waiters_of_a_fill_into_a_lost_tier_are_served_from_another() -> None:
    node = node_of(ram=2, nvme=2)
    tell(node, Demanded(ONE, 1, A, True, SIZE))
    assert tell(node, TierLost(RAM)) == [StartFill(A, NVME)]
    assert tell(node, Filled(A, NVME)) == [Grant(ONE, 1, A, NVME, "brief")]
    assert tell(node, FillFailed(A, RAM, 9, "io")) == []


def test_fills_of_a_lost_tier_begin_elsewhere_in_the_order_in_which_they_began() -> None:
    node, extents = node_of(ram=20, nvme=20, max_fills=20), [ExtentId(bytes([n]) * 16) for n in range(10)]
    tell(node, *(Demanded(ReaderId(n + 1), n, extent, True, SIZE) for n, extent in enumerate(extents)))
    assert tell(node, TierLost(RAM)) == [StartFill(extent, NVME) for extent in extents]


def test_pinned_extents_stay_pinned_when_their_tier_was_lost_while_they_were_read() -> None:
    node = node_of(nvme=2)
    tell(node, declare(A, B, C))
    read(node, A, B)
    tell(node, Pinned(DATASET), Demanded(ONE, 1, A), Demanded(ONE, 2, B))
    tell(node, TierLost(NVME), Released(ONE, A), TierBack(NVME), Released(ONE, B))
    assert tell(node, Demanded(ONE, 3, C)) == [Refuse(ONE, 3, C)], "nothing gives way"
    assert node.counters(DATASET).kept_bytes == 2 * SIZE


def test_a_plan_whose_extents_fit_only_a_lost_tier_holds_no_other_plan_up() -> None:
    node = node_of(ram=4, nvme=20)
    large = tuple((extent, 6 * SIZE) for extent in (A, B))
    tell(node, DatasetDeclared(1, DATASET, large), declare(C, D, job=2, dataset=OTHER), TierLost(NVME))
    assert tell(node, plan(A, B)) == []
    assert tell(node, plan(C, D, number=2, job=2)) == [StartFill(C, RAM), StartFill(D, RAM)]
    assert tell(node, Demanded(ONE, 1, A)) == [Refuse(ONE, 1, A)], "read past the tiers"
    fill(node, C, D)
    assert tell(node, TierBack(NVME), Passed(1, 1)) == [StartFill(B, NVME)], "within the window only"


def test_a_quota_counts_no_copies_in_a_lost_tier() -> None:
    node = Node([TierSpec(NVME, 4 * SIZE), TierSpec(NVME1, 4 * SIZE)], NodeSettings(lookahead_bytes=SIZE))
    tell(node, DatasetDeclared(1, DATASET, ((A, SIZE), (B, SIZE)), 1000, 2 * SIZE), Prefetched(1, DATASET))
    fill(node, A, tier=NVME)
    fill(node, B, tier=NVME1)
    assert tell(node, TierLost(NVME)) == [StartFill(A, NVME1)]
    fill(node, A, tier=NVME1)
    tell(node, TierBack(NVME))
    assert node.counters(DATASET).kept_bytes == 2 * SIZE
    assert node.progress(1).resident_extents == 2
