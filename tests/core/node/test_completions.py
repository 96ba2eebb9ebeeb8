"""Answers of the executor: fills that fail, commits, corrupt copies."""

from __future__ import annotations

import math

from cachesvc.core.commands import Evict, Fail, Grant, Recall, Refuse, StartFill
from cachesvc.core.errors import OutOfSpace, SourceUnavailable
from cachesvc.core.events import (
    CommitFailed,
    Committed,
    Corrupt,
    Demanded,
    Evicted,
    Filled,
    FillFailed,
    Prefetched,
    ReaderGone,
    Recovered,
    Released,
    Tick,
)
from cachesvc.core.limits import FILL_RETRY_CAP_S
from cachesvc.core.model import RAM
from cachesvc.core.node.completions import fill_backoff_s
from tests.support.core.names import DATASET, NVME, ONE, SIZE, TWO, A, B, C
from tests.support.core.node import declare, fill, node_of, plan, tell


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
