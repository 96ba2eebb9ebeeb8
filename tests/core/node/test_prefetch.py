"""Prefetches: what they fill, how they end, and what they fill again."""

from __future__ import annotations

import pytest

from cachesvc.core.commands import Evict, Recall, StartFill
from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.events import (
    CommitFailed,
    Committed,
    Corrupt,
    Demanded,
    Event,
    EvictAsked,
    Evicted,
    Filled,
    FillFailed,
    JobEnded,
    Pinned,
    Prefetched,
    Recovered,
    Released,
    Resized,
    TierBack,
    TierLost,
)
from cachesvc.core.model import RAM
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from tests.support.core.names import DATASET, NVME, NVME1, ONE, OTHER, SIZE, A, B, C, D, E, F
from tests.support.core.node import declare, fill, node_of, plan, tell


def test_prefetch_reports_what_is_resident_what_failed_and_what_does_not_fit() -> None:
    node = node_of(ram=3)
    started = tell(node, declare(A, B, C, D, E), Prefetched(1, DATASET))
    assert started == [StartFill(A, RAM), StartFill(B, RAM)]
    fill(node, A)
    tell(node, FillFailed(B, RAM, 4, "gone"))
    progress = node.progress(1)
    assert (progress.resident_extents, progress.total_bytes) == (1, 5 * SIZE)
    assert progress.failed == {B: (4, "gone")}
    assert progress.stuck_bytes == 3 * SIZE
    assert progress.finished


def test_an_eviction_ends_a_prefetch_until_it_is_asked_for_again() -> None:
    node = node_of(ram=4)
    tell(node, declare(A, B, C), Prefetched(1, DATASET))
    assert node.claims.prefetching(1)
    tell(node, EvictAsked(DATASET))
    fill(node, A, B)
    assert (node.progress(1).finished, node.claims.prefetching(1)) == (False, False)
    tell(node, Prefetched(1, DATASET))
    assert node.claims.prefetching(1)


@pytest.mark.parametrize("other", [declare(A, B, C, job=2), Pinned(DATASET)])
def test_a_prefetch_ends_with_its_job_though_others_claim_the_dataset(other: Event) -> None:
    node = node_of(ram=4, max_fills=1)
    assert tell(node, declare(A, B, C), Prefetched(1, DATASET), other) == [StartFill(A, RAM)]
    tell(node, JobEnded(1))
    assert fill(node, A) == []


def test_a_prefetch_goes_on_until_its_last_job_ends_and_lasts_when_it_is_done() -> None:
    node = node_of(ram=4, max_fills=1)
    tell(node, declare(A, B), declare(A, B, job=2), declare(A, B, job=3))
    tell(node, Prefetched(1, DATASET), Prefetched(2, DATASET), JobEnded(1))
    assert fill(node, A) == [StartFill(B, RAM)]
    fill(node, B)
    tell(node, JobEnded(2))
    assert tell(node, Corrupt(A, RAM), Evicted(A, RAM)) == [Evict(A, RAM), StartFill(A, RAM)]


def test_a_prefetch_fills_into_nvme_what_is_evicted_as_ram_shrinks() -> None:
    node = node_of(ram=2, nvme=3, max_fills=1)
    assert tell(node, declare(A, B), Prefetched(1, DATASET)) == [StartFill(A, RAM)]
    assert fill(node, A) == [StartFill(B, RAM)]
    assert tell(node, Resized(RAM, 0)) == [Evict(A, RAM)], "the fill under way ends first"
    assert tell(node, Evicted(A, RAM)) == []
    assert fill(node, B) == [Evict(B, RAM), StartFill(A, NVME)]
    assert not node.progress(1).finished
    assert tell(node, Evicted(B, RAM)) == []
    assert fill(node, A, tier=NVME) == [StartFill(B, NVME)]
    fill(node, B, tier=NVME)
    progress = node.progress(1)
    assert (progress.finished, progress.resident_extents, progress.stuck_extents) == (True, 2, 0)


def test_an_extent_that_a_reader_held_as_ram_shrank_displaces_unclaimed_ones_on_nvme() -> None:
    node = node_of(ram=2, nvme=3)
    tell(node, Recovered(NVME, {D: SIZE, E: SIZE, F: SIZE}), declare(A, B), Prefetched(1, DATASET))
    fill(node, A, B)
    assert node.progress(1).finished
    tell(node, Demanded(ONE, 1, A), Demanded(ONE, 2, B))
    assert tell(node, Resized(RAM, SIZE)) == [Recall(ONE, A, wrong=False)]
    assert tell(node, Released(ONE, A)) == [Evict(A, RAM), Evict(D, NVME)]
    assert not node.progress(1).finished
    assert tell(node, Evicted(D, NVME)) == [StartFill(A, NVME)]
    fill(node, A, tier=NVME)
    assert (node.progress(1).finished, node.progress(1).resident_extents) == (True, 2)


def test_a_prefetch_reports_extents_that_no_other_tier_has_room_for_as_ram_shrinks() -> None:
    node = node_of(ram=2, nvme=2, lookahead_bytes=0)
    tell(node, Recovered(NVME, {E: SIZE}), declare(E, job=2, dataset=OTHER), declare(A, B))
    tell(node, Prefetched(1, DATASET))
    fill(node, A, B)
    assert tell(node, Resized(RAM, 0)) == [Evict(A, RAM), Evict(B, RAM), StartFill(A, NVME)]
    tell(node, Evicted(A, RAM), Evicted(B, RAM))
    fill(node, A, tier=NVME)
    assert (node.progress(1).finished, node.progress(1).stuck_extents) == (True, 1)


@pytest.mark.parametrize("loss", [Corrupt(A, NVME), TierLost(NVME)], ids=["corrupt", "lost"])
def test_an_extent_that_a_prefetch_loses_during_its_promotion_is_filled_again(loss: Event) -> None:
    node = node_of(ram=4, nvme=4)
    assert tell(node, Recovered(NVME, {A: SIZE}), declare(A), plan(A, number=2, job=2)) == [
        StartFill(A, RAM, NVME)
    ]
    tell(node, Prefetched(1, DATASET), loss)
    assert StartFill(A, RAM) in tell(node, FillFailed(A, RAM, SourceUnavailable.code, "torn", retry=True))
    assert not node.progress(1).finished
    fill(node, A)
    assert node.progress(1).resident_extents == 1


def test_a_prefetch_fills_into_another_tier_what_a_lost_one_was_taking() -> None:
    node = Node([TierSpec(NVME, SIZE), TierSpec(NVME1, SIZE)], NodeSettings())
    tell(node, declare(A))
    (fill_of_a,) = tell(node, Prefetched(1, DATASET))
    assert fill_of_a == StartFill(A, NVME)
    assert tell(node, TierLost(NVME)) == [StartFill(A, NVME1)], "it may be long until the lost one answers"
    tell(node, Filled(A, NVME), Committed(A, NVME))
    assert not node.progress(1).finished
    fill(node, A, tier=NVME1)
    assert node.progress(1).resident_extents == 1


def test_a_prefetch_is_done_though_the_only_tier_is_lost_while_it_fills() -> None:
    node = node_of(nvme=2)
    tell(node, declare(A), Prefetched(1, DATASET), TierLost(NVME), Filled(A, NVME), Committed(A, NVME))
    assert node.progress(1).finished
    assert node.progress(1).stuck_extents == 1
    tell(node, TierBack(NVME))
    assert (node.progress(1).resident_extents, node.progress(1).stuck_extents) == (1, 0)


def test_a_prefetch_is_not_done_while_another_tier_takes_what_a_lost_one_had_not_committed() -> None:
    node = Node([TierSpec(NVME, SIZE), TierSpec(NVME1, SIZE)])
    assert tell(node, declare(A), Prefetched(1, DATASET), Filled(A, NVME)) == [StartFill(A, NVME)]
    assert tell(node, TierLost(NVME), CommitFailed(A, NVME, "gone")) == [StartFill(A, NVME1)]
    assert (node.progress(1).finished, node.progress(1).failed) == (False, {})
    fill(node, A, tier=NVME1)
    assert (node.progress(1).finished, node.progress(1).failed) == (True, {})
