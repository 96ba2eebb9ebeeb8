"""Demands: single-flight fills, leases, refusals, how they are counted; and the answers of the executor."""

from __future__ import annotations

import math

import pytest

from cachesvc.core.commands import Evict, Fail, Grant, Recall, Refuse, StartFill
from cachesvc.core.errors import NotFound, OutOfSpace, SourceUnavailable
from cachesvc.core.events import (
    CommitFailed,
    Committed,
    Corrupt,
    DatasetDeclared,
    Demanded,
    EvictAsked,
    Evicted,
    Filled,
    FillFailed,
    HoldReported,
    JobEnded,
    NotGranted,
    Passed,
    Planned,
    Prefetched,
    ReaderGone,
    Recovered,
    Released,
    Tick,
)
from cachesvc.core.limits import FILL_RETRY_CAP_S
from cachesvc.core.model import RAM, Counted
from cachesvc.core.node.completions import fill_backoff_s
from cachesvc.core.tiering.copies import UNDECLARED
from tests.support.core.names import DATASET, NVME, ONE, OTHER, SIZE, THREE, TWO, A, B, C, D, E
from tests.support.core.node import declare, fill, node_of, plan, read, status, tell


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
    assert status(node).tiers[0].evicted_bytes == 0
    assert tell(node, Evicted(A, RAM)) == [StartFill(B, RAM)]
    assert status(node).tiers[0].evicted_bytes == SIZE
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


def test_a_failed_fill_answers_all_waiters_and_the_next_demand_tries_again() -> None:
    node = node_of(ram=2)
    tell(node, declare(A), Demanded(ONE, 1, A), Demanded(TWO, 2, A))
    assert tell(node, FillFailed(A, RAM, 5, "torn")) == [
        Fail(ONE, 1, A, 5, "torn"),
        Fail(TWO, 2, A, 5, "torn"),
    ]
    assert tell(node, Demanded(ONE, 3, A)) == [StartFill(A, RAM)]


def test_a_fill_worth_retrying_keeps_its_waiters_until_the_attempts_are_exhausted() -> None:
    node = node_of(ram=2, max_attempts=2)
    code = SourceUnavailable.code
    tell(node, declare(A), Demanded(ONE, 1, A))
    assert tell(node, FillFailed(A, RAM, code, "503", retry=True)) == []
    due = node.next_deadline()
    assert tell(node, Tick(), now=due - 0.001) == []
    assert tell(node, Tick(), now=due) == [StartFill(A, RAM)]
    assert node.next_deadline() == math.inf
    assert tell(node, FillFailed(A, RAM, code, "503", retry=True)) == [Fail(ONE, 1, A, code, "503")]


def test_an_nvme_extent_is_granted_before_its_commit_and_evicted_only_after() -> None:
    node = node_of(nvme=1)
    tell(node, Demanded(ONE, 1, A, True, SIZE))
    assert tell(node, Filled(A, NVME)) == [Grant(ONE, 1, A, NVME, "brief")]
    tell(node, Released(ONE, A))
    assert tell(node, Demanded(ONE, 2, B, True, SIZE)) == []
    assert tell(node, Committed(A, NVME)) == [Evict(A, NVME)]


def test_a_failed_commit_drops_the_copy_when_its_leases_end() -> None:
    node = node_of(nvme=1)
    tell(node, Demanded(ONE, 1, A, True, SIZE), Filled(A, NVME))
    assert tell(node, CommitFailed(A, NVME, "io")) == [Recall(ONE, A)]
    assert tell(node, Demanded(TWO, 2, A, True, SIZE)) == [Refuse(TWO, 2, A)]
    assert tell(node, Released(ONE, A)) == [Evict(A, NVME)]


def test_a_tier_that_cannot_commit_for_want_of_room_is_full_for_a_while() -> None:
    node = node_of(ram=1, nvme=2)
    tell(node, Demanded(ONE, 1, A, True, SIZE), Filled(A, RAM))
    tell(node, Demanded(ONE, 2, B, True, SIZE), Filled(B, NVME))
    assert tell(node, CommitFailed(B, NVME, "full", OutOfSpace.code)) == [Recall(ONE, B)]
    assert tell(node, Released(ONE, B), Evicted(B, NVME)) == [Evict(B, NVME)]
    assert tell(node, Demanded(ONE, 3, C, True, SIZE)) == [Refuse(ONE, 3, C)]  # not into a full tier
    later = 2 * node.policy.settings.full_s
    assert node.handle(Tick(), later) == []
    assert node.handle(Demanded(ONE, 4, C, True, SIZE), later) == [StartFill(C, NVME)]


def test_a_corrupt_copy_is_not_granted_again_and_is_filled_again_when_wanted() -> None:
    node = node_of(ram=2)
    tell(node, declare(A), Prefetched(1, DATASET))
    fill(node, A)
    assert tell(node, Corrupt(A, RAM)) == [Evict(A, RAM)]
    assert tell(node, Demanded(ONE, 1, A)) == []
    assert tell(node, Evicted(A, RAM)) == [StartFill(A, RAM)]


def test_a_corrupt_copy_that_another_tier_has_too_is_repaired_from_that() -> None:
    node = node_of(ram=1, nvme=2)
    tell(node, Recovered(NVME, {A: SIZE, B: SIZE}), declare(A, B), plan(A, B))
    fill(node, A)  # the promotion from the disk
    assert tell(node, Corrupt(A, RAM)) == [Evict(A, RAM)]
    assert tell(node, Demanded(ONE, 1, A)) == [Grant(ONE, 1, A, NVME, "kept")]
    assert tell(node, Evicted(A, RAM)) == [], "no source is asked"
    assert tell(node, Demanded(TWO, 2, A)) == [Grant(TWO, 2, A, NVME, "kept")]


def test_a_corrupt_file_is_evicted_and_filled_again_though_it_is_leased() -> None:
    node = node_of(nvme=2)
    tell(node, declare(A), Demanded(ONE, 1, A), Demanded(TWO, 2, A))
    fill(node, A, tier=NVME)
    assert tell(node, Corrupt(A, NVME)) == [Recall(ONE, A), Recall(TWO, A), Evict(A, NVME)]
    assert tell(node, Released(ONE, A), Demanded(ONE, 3, A)) == []
    assert tell(node, Evicted(A, NVME)) == [StartFill(A, NVME)]
    assert tell(node, Filled(A, NVME), Committed(A, NVME)) == [Grant(ONE, 3, A, NVME)]
    assert tell(node, Released(TWO, A), ReaderGone(TWO)) == []


def test_backoff_doubles_up_to_its_cap_and_differs_between_extents() -> None:
    delays = [fill_backoff_s(attempt, A) for attempt in range(1, 40)]
    assert delays == sorted(delays)
    assert delays[-1] <= FILL_RETRY_CAP_S
    assert fill_backoff_s(1, A) != fill_backoff_s(1, B)
