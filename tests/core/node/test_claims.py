"""Claims: what is kept of datasets, quotas, pins, and claims in steps."""

from __future__ import annotations

import math

import pytest

from cachesvc.core.commands import Evict, Refuse, StartFill
from cachesvc.core.events import (
    DatasetDeclared,
    Demanded,
    Event,
    EvictAsked,
    Evicted,
    JobEnded,
    Passed,
    Pinned,
    Prefetched,
    QuotasChanged,
    Recovered,
    Released,
    Tick,
    Unpinned,
)
from cachesvc.core.model import RAM, DatasetId, ExtentId
from tests.support.core.invariants import check
from tests.support.core.names import DATASET, NVME, ONE, OTHER, SIZE, TWO, A, B, C, D, E, F
from tests.support.core.node import declare, fill, node_of, plan, read, status, tell


def test_claimed_extents_are_kept_and_the_rest_streams_through_the_window() -> None:
    node = node_of(ram=3)
    tell(node, declare(A, B, C, D, E))
    read(node, A, B, C, D, E)
    assert [node.where(extent) for extent in (A, B, C, D, E)] == [RAM, RAM, None, None, RAM]
    read(node, D, C)
    assert node.where(A) == node.where(B) == RAM
    assert node.counters(DATASET).bound == pytest.approx(3 / 5)


def test_an_undeclared_scan_evicts_nothing_that_is_kept_or_ahead() -> None:
    node = node_of(ram=4, lookahead_bytes=2 * SIZE)
    tell(node, declare(A, B, C, D, E), plan(A, B, C, D, E))
    fill(node, A)
    tell(node, Demanded(TWO, 1, A), Passed(1, 1))
    had = {each for each in (A, B, C, D, E) if node.where(each)}
    for number in range(20):
        read(node, ExtentId(bytes([100 + number]) * 16))
    assert had <= {each for each in (A, B, C, D, E) if node.where(each)}


def test_claimed_extents_displace_undeclared_ones() -> None:
    node = node_of(ram=2)
    read(node, A, B)
    assert tell(node, declare(C, D), Prefetched(1, DATASET)) == [Evict(A, RAM)]
    assert tell(node, Evicted(A, RAM)) == [StartFill(C, RAM), Evict(B, RAM)]


def test_two_datasets_share_what_can_be_kept_by_size() -> None:
    node = node_of(ram=5)
    tell(node, declare(A, B, C, D))
    read(node, A, B, C, D)
    tell(node, declare(E, F, job=2, dataset=OTHER))
    read(node, E, F, E, F)
    kept = {name: node.counters(name).kept_bytes // SIZE for name in (DATASET, OTHER)}
    assert kept == {DATASET: 3, OTHER: 1}


def test_two_jobs_on_one_dataset_share_what_is_kept_and_the_last_frees_it() -> None:
    node = node_of(ram=3)
    tell(node, declare(A, B, C, D), declare(A, B, C, D, job=2))
    read(node, A, B, C)
    assert node.counters(DATASET).kept_bytes == 2 * SIZE
    tell(node, JobEnded(1))
    assert node.counters(DATASET).kept_bytes == 2 * SIZE
    tell(node, JobEnded(2))
    assert status(node).datasets == []


def test_a_quota_limits_what_is_kept_of_a_dataset_and_for_a_user() -> None:
    node = node_of(ram=8)
    ten, twenty = 1 * SIZE, 2 * SIZE
    tell(node, DatasetDeclared(1, DATASET, ((A, SIZE), (B, SIZE)), 1000, ten, twenty))
    tell(node, DatasetDeclared(2, OTHER, ((C, SIZE), (D, SIZE)), 1000, None, twenty))
    tell(node, DatasetDeclared(3, DatasetId("x"), ((E, SIZE), (F, SIZE)), 1001, None, twenty))
    read(node, A, B, C, D, E, F)
    kept = [node.counters(name).kept_bytes for name in (DATASET, OTHER, DatasetId("x"))]
    assert kept == [SIZE, SIZE, 2 * SIZE]
    assert node.where(B) == RAM, "in room that is free"


@pytest.mark.parametrize(
    ("pins", "kept"), [([], 1), ([Pinned(OTHER)], 3), ([Pinned(OTHER, False, 1000, None, SIZE)], 1)]
)
def test_extents_that_pass_to_another_dataset_are_kept_within_its_quota(pins: list[Event], kept: int) -> None:
    node = node_of(ram=8)
    both = ((A, SIZE), (B, SIZE), (C, SIZE))
    tell(node, declare(A, B, C), DatasetDeclared(2, OTHER, both, 1000, None, SIZE))
    read(node, A, B, C)
    tell(node, *pins, Demanded(ONE, 1, C), JobEnded(1), Released(ONE, C))
    assert node.counters(OTHER).kept_bytes == kept * SIZE
    assert {node.where(each) for each in (A, B, C)} == {RAM}, "in room that is free"


@pytest.mark.parametrize("of", ["user", "data"])
def test_a_user_pins_no_more_than_its_quota_and_the_rest_is_evicted(of: str) -> None:
    node = node_of(ram=6, lookahead_bytes=0)
    quotas = (None, 2 * SIZE) if of == "user" else (2 * SIZE, None)
    four = tuple((each, SIZE) for each in (A, B, C, D))
    tell(node, DatasetDeclared(1, DATASET, four, 1000, *quotas))
    read(node, A, B, C, D)
    tell(node, Pinned(DATASET, False, 1000, *quotas))
    assert node.counters(DATASET).kept_bytes == 2 * SIZE
    others = tuple(ExtentId(bytes([number]) * 16) for number in range(50, 54))
    tell(node, declare(*others, job=2, dataset=OTHER))
    read(node, *others)
    assert node.counters(OTHER).kept_bytes == 4 * SIZE
    assert [node.where(each) for each in (A, B, C, D)].count(RAM) == 2
    assert tell(node, EvictAsked(DATASET)) == [], "what a pin holds"


def test_pinned_bytes_count_for_the_user_who_pinned_them_and_then_for_the_first_claim() -> None:
    node = node_of(ram=8)
    three, mine = ((A, SIZE), (B, SIZE), (C, SIZE)), Pinned(DATASET, False, 1001, None, SIZE)
    tell(node, DatasetDeclared(1, DATASET, three, 1000, None, 2 * SIZE))
    tell(node, DatasetDeclared(2, OTHER, ((D, SIZE),), 1001, None, SIZE))
    read(node, A, B, C)

    def kept() -> int:
        return node.counters(DATASET).kept_bytes // SIZE

    assert kept() == 2
    tell(node, mine)
    assert kept() == 1
    read(node, D)
    assert node.counters(OTHER).kept_bytes == 0, "the pin takes it all"
    tell(node, Pinned(DATASET))
    assert kept() == 3, "who runs the node has no quota"
    tell(node, Unpinned(DATASET))
    assert kept() == 2
    assert {node.where(each) for each in (A, B, C)} == {RAM}, "in room that is free"


def test_quotas_that_change_hold_for_claims_and_pins_that_are_there() -> None:
    node = node_of(ram=8)
    three = ((A, SIZE), (B, SIZE), (C, SIZE))
    tell(node, DatasetDeclared(1, DATASET, three, 1000))
    read(node, A, B, C)

    def kept(*told: Event) -> int:
        tell(node, *told)
        while not node.claims.settled(DATASET):
            tell(node, Tick())
        return node.counters(DATASET).kept_bytes // SIZE

    assert kept() == 3
    assert kept(QuotasChanged(DATASET, 2 * SIZE, {1000: None})) == 2
    assert kept(QuotasChanged(DATASET, 2 * SIZE, {1000: SIZE})) == 1
    assert kept(Pinned(DATASET)) == 3, "who runs the node has no quota"
    assert kept(QuotasChanged(DATASET, None, {1000: 2 * SIZE})) == 3
    assert kept(Unpinned(DATASET)) == 2
    assert kept(QuotasChanged(DATASET, None, {1000: None})) == 3
    assert {node.where(each) for each in (A, B, C)} == {RAM}, "in room that is free"


@pytest.mark.parametrize("gradual", [False, True])
def test_the_window_fits_the_largest_extents_of_the_claims_that_last(gradual: bool) -> None:
    node = node_of(ram=20, claim_step=1, lookahead_bytes=None)
    large = DatasetDeclared(1, OTHER, ((E, 5 * SIZE), (F, SIZE)), gradual=gradual)
    small = declare(A, B, C, job=2)
    tell(node, small)
    before = node.policy.reserve.window_bytes
    tell(node, large, *[Tick()] * 9)
    assert node.policy.reserve.window_bytes > before
    tell(node, JobEnded(1), *[Tick()] * 9)
    assert node.policy.reserve.window_bytes == before


def test_pinned_extents_outlive_their_job_and_an_asked_eviction() -> None:
    node = node_of(ram=1)
    tell(node, declare(A))
    read(node, A)
    tell(node, Pinned(DATASET), JobEnded(1))
    assert tell(node, EvictAsked(DATASET)) == []
    assert tell(node, Demanded(ONE, 1, B, True, SIZE)) == [Refuse(ONE, 1, B)]


def test_an_ended_job_leaves_its_extents_as_undeclared_ones() -> None:
    node = node_of(ram=1)
    tell(node, declare(A), declare(A, job=2))
    read(node, A)
    tell(node, JobEnded(1))
    assert node.counters(DATASET).kept_bytes == SIZE
    tell(node, JobEnded(2))
    assert tell(node, Demanded(ONE, 1, B, True, SIZE)) == [Evict(A, RAM)]


def test_a_gradual_claim_is_taken_up_step_by_step_and_ends_as_any_other() -> None:
    extents = (A, B, C, D, E)
    claim = DatasetDeclared(1, DATASET, tuple((extent, SIZE) for extent in extents), gradual=True)
    at_once, node = (node_of(ram=2, nvme=2, claim_step=2) for _ in range(2))
    for each in (at_once, node):
        tell(each, Recovered(NVME, {A: SIZE, E: SIZE}))
    tell(at_once, declare(*extents))
    tell(node, claim)
    ticks = 0
    while not node.claims.claimed(DATASET):
        assert node.next_deadline() < math.inf
        tell(node, Tick())
        check(node)
        ticks += 1
    assert ticks == 7  # three steps that claim, three that assign roles, and the end
    assert node.next_deadline() == math.inf
    assert status(node) == status(at_once)
    tell(node, JobEnded(1), Tick(), claim, Tick(), JobEnded(1))
    ticks = 0
    while not node.claims.claimed(DATASET):
        assert node.next_deadline() < math.inf
        tell(node, Tick())
        ticks += 1
    assert ticks == 4  # three steps that end the claim, and the end
    assert status(node).datasets == []
    assert status(node).tiers[1].kept_bytes == 0


def test_a_claim_made_during_the_end_of_the_last_one_restores_it() -> None:
    extents = (A, B, C, D, E)
    claim = DatasetDeclared(1, DATASET, tuple((extent, SIZE) for extent in extents), gradual=True)
    node, new = (node_of(ram=5, nvme=5, claim_step=2) for _ in range(2))
    for each in (node, new):
        tell(each, Recovered(NVME, {A: SIZE, E: SIZE}), declare(*extents, job=7))
    tell(node, JobEnded(7), Tick(), Pinned(DATASET), claim, JobEnded(1), Tick(), claim)
    tell(new, claim, JobEnded(7))
    while not node.claims.claimed(DATASET):
        tell(node, Tick())
    assert status(node) == status(new)
    tell(node, JobEnded(1), *(Tick() for _ in range(4)))
    assert node.claims.claimed(DATASET)
    assert status(node).datasets == []


def test_a_pin_finishes_a_gradual_claim_at_once_and_a_prefetch_waits_for_it() -> None:
    extents = (A, B, C, D, E)
    claim = DatasetDeclared(1, DATASET, tuple((extent, SIZE) for extent in extents), gradual=True)
    node = node_of(ram=5, claim_step=1)
    assert tell(node, claim, Prefetched(1, DATASET)) == []
    assert tell(node, Tick()) == [], "nothing is prefetched before all is known"
    tell(node, Pinned(DATASET))
    assert node.claims.claimed(DATASET)
    tell(node, JobEnded(1), Unpinned(DATASET), claim)
    assert not node.claims.claimed(DATASET)
    tell(node, declare(*extents, job=2))
    assert node.claims.claimed(DATASET)
