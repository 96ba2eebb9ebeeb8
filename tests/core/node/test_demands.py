"""Demands: single-flight fills, leases, refusals, and how they are counted."""

from __future__ import annotations

import pytest

from cachesvc.core.commands import Evict, Fail, Grant, Recall, Refuse, StartFill
from cachesvc.core.errors import NotFound
from cachesvc.core.events import (
    Corrupt,
    DatasetDeclared,
    Demanded,
    EvictAsked,
    Evicted,
    Filled,
    HoldReported,
    JobEnded,
    NotGranted,
    Passed,
    Planned,
    Prefetched,
    ReaderGone,
    Released,
)
from cachesvc.core.model import RAM, Counted
from cachesvc.core.tiering.copies import UNDECLARED
from tests.support.core.names import DATASET, NVME, ONE, OTHER, SIZE, THREE, TWO, A, B, C, D, E
from tests.support.core.node import declare, fill, node_of, plan, read, tell


def test_many_readers_of_one_cold_extent_cost_one_fill() -> None:
    node = node_of(ram=4)
    tell(node, declare(A))
    assert tell(node, Demanded(ONE, 7, A)) == [StartFill(A, RAM)]
    assert tell(node, Demanded(TWO, 8, A)) == []
    assert tell(node, Filled(A, RAM)) == [Grant(ONE, 7, A, RAM), Grant(TWO, 8, A, RAM)]
    assert tell(node, Demanded(THREE, 9, A)) == [Grant(THREE, 9, A, RAM)]
    counters = node.counters(DATASET)
    assert (counters.hits, counters.misses, counters.source_bytes) == (1, 2, SIZE)


def test_a_demand_for_an_unknown_extent_fails_and_says_what_to_do() -> None:
    (answer,) = tell(node_of(ram=1), Demanded(ONE, 7, A))
    assert isinstance(answer, Fail)
    assert answer.code == NotFound.code
    assert "open the dataset" in answer.message


def test_a_demand_that_does_not_wait_is_answered_at_once_and_starts_nothing() -> None:
    node = node_of(ram=2)
    tell(node, declare(A))
    assert tell(node, Demanded(ONE, 1, A, wait=False)) == [Refuse(ONE, 1, A)]


def test_a_demand_waits_for_an_eviction_and_is_refused_when_only_readers_could_free_room() -> None:
    node = node_of(ram=1)
    read(node, A)
    assert tell(node, Demanded(ONE, 1, B, True, SIZE)) == [Evict(A, RAM)]
    assert node.status().tiers[0].evicted_bytes == 0
    assert tell(node, Evicted(A, RAM)) == [StartFill(B, RAM)]
    assert node.status().tiers[0].evicted_bytes == SIZE
    fill(node, B)
    assert tell(node, Demanded(TWO, 2, C, True, SIZE)) == [Refuse(TWO, 2, C)]
    tell(node, Released(ONE, B))
    assert tell(node, Demanded(TWO, 3, C, True, SIZE)) == [Evict(B, RAM)]


@pytest.mark.parametrize("claimed", [False, True], ids=["undeclared", "claimed meanwhile"])
def test_no_counter_goes_back_when_a_waiting_reader_is_refused(claimed: bool) -> None:
    node = node_of(ram=1)
    read(node, A)
    tell(node, Demanded(ONE, 1, B, True, SIZE))
    before = node.counters(UNDECLARED)
    tell(node, *[declare(B)] * claimed, HoldReported(TWO, C, SIZE))
    recall = [Recall(TWO, C, wrong=False)] * claimed
    assert tell(node, Evicted(A, RAM)) == [Refuse(ONE, 1, B), *recall]
    after = node.counters(DATASET if claimed else UNDECLARED)
    assert after.misses == before.misses * (not claimed)
    assert after.refused == 1


def test_a_dead_reader_frees_all_its_leases() -> None:
    node = node_of(ram=1)
    read(node, A)
    tell(node, Demanded(ONE, 1, A), Demanded(ONE, 2, A), Released(ONE, A))
    assert tell(node, Demanded(TWO, 3, B, True, SIZE)) == [Refuse(TWO, 3, B)]
    tell(node, ReaderGone(ONE))
    assert tell(node, Demanded(TWO, 4, B, True, SIZE)) == [Evict(A, RAM)]


def test_undeclared_extents_are_evicted_oldest_first() -> None:
    node = node_of(ram=3)
    read(node, A, B, C, A)
    assert tell(node, Demanded(ONE, 1, D, True, SIZE)) == [Evict(B, RAM)]


def test_leases_last_one_read_where_readers_compete_for_the_window() -> None:
    node = node_of(ram=3)
    tell(node, declare(A, B, C, D, E), Planned(1, 1, tuple((each, 0, 9) for each in (A, B, C, D, E))))
    fill(node, A, B)
    assert read(node, A, B, C) == ["kept", "kept", "once"]
    calm = node_of(ram=3, lookahead_bytes=2 * SIZE)
    tell(calm, declare(A, B, C, D, E), plan(A, B, C, D, E))
    fill(calm, A)
    assert read(calm, A, B) == ["brief", "brief"]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("counted", ["hits", "misses", "ahead"])
def test_a_grant_that_could_not_be_handed_over_does_not_count(counted: Counted, again: bool) -> None:
    node = node_of(nvme=4)
    tell(node, declare(A, B))
    if counted == "ahead":
        tell(node, plan(A))
    if counted != "misses":
        tell(node, *([] if counted == "ahead" else [Prefetched(1, DATASET)]))
        fill(node, A, tier=NVME)
    answers = tell(node, Demanded(ONE, 1, A))
    if counted == "misses":
        answers = fill(node, A, tier=NVME)
    (grant,) = (answer for answer in answers if isinstance(answer, Grant))
    assert grant.counted == counted
    before = node.counters(DATASET)
    answers = tell(node, *([Corrupt(A, NVME)] if again else []), NotGranted(grant, again))
    after = node.counters(DATASET)
    assert getattr(after, counted) == getattr(before, counted) - 1
    assert after.refused == before.refused + (not again)
    assert (Refuse(ONE, 1, A) in answers) == (not again)
    assert after.hits + after.ahead + after.misses + after.refused == (not again), "it waits for the new copy"
    tell(node, ReaderGone(ONE))
    assert tell(node, NotGranted(grant, again)) == [], "it has gone"


def test_reads_and_epochs_count_for_the_dataset_that_their_job_claims() -> None:
    """Extent B is in both datasets, as where a folder and a folder inside it are opened."""
    node = node_of(ram=4)
    tell(node, declare(A, B, job=1), declare(B, C, job=2, dataset=OTHER))
    tell(node, Demanded(TWO, 1, B))
    fill(node, B)
    tell(node, Demanded(TWO, 2, B), Demanded(ONE, 3, B))
    tell(node, plan(B, number=2, job=2), Passed(2, 1))
    mine, other = node.counters(DATASET), node.counters(OTHER)
    assert (mine.hits, mine.misses, mine.source_bytes) == (1, 0, SIZE), (
        "bytes once, where they were claimed first"
    )
    assert (other.hits, other.misses, other.source_bytes) == (1, 1, 0)
    assert [len(each.epochs) for each in (mine, other)] == [0, 1]


def test_an_extent_that_is_neither_claimed_nor_resident_has_no_entry() -> None:
    node = node_of(ram=1)
    tell(node, declare(A, B))
    read(node, A)
    tell(node, JobEnded(1), EvictAsked(DATASET, (A, B)), Evicted(A, RAM), ReaderGone(ONE))
    assert not node.copies.entries
    assert not node.readers.readers


def test_bytes_from_a_peer_cost_the_source_nothing_and_grants_say_so() -> None:
    node = node_of(ram=4)
    tell(node, DatasetDeclared(1, DATASET, ((A, SIZE), (B, SIZE))), Demanded(ONE, 1, A), Demanded(ONE, 2, B))
    assert tell(node, Filled(A, RAM, from_peer=True)) == [Grant(ONE, 1, A, RAM, from_peer=True)]
    assert tell(node, Filled(B, RAM)) == [Grant(ONE, 2, B, RAM)]
    assert node.counters(DATASET).source_bytes == SIZE
    tell(node, Released(ONE, A), Corrupt(A, RAM), Evicted(A, RAM), Demanded(ONE, 3, A))
    assert Grant(ONE, 3, A, RAM) in tell(node, Filled(A, RAM))
