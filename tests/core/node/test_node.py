"""What one node decides, event by event."""

from __future__ import annotations

import math

import pytest

from cachesvc.core.commands import Evict, Fail, Grant, Recall, Refuse, StartFill
from cachesvc.core.errors import NotFound, OutOfSpace, SourceUnavailable, TierFailed
from cachesvc.core.events import (
    CommitFailed,
    Committed,
    Corrupt,
    DatasetDeclared,
    Demanded,
    Event,
    EvictAsked,
    Evicted,
    Filled,
    FillFailed,
    HoldReported,
    JobEnded,
    NotGranted,
    Passed,
    Pinned,
    PlanEnded,
    Planned,
    Prefetched,
    ReaderGone,
    Recovered,
    Released,
    Resized,
    Stalled,
    Tick,
    TierBack,
    TierLost,
    Unpinned,
)
from cachesvc.core.lookahead.lookahead import FEED_LIMIT
from cachesvc.core.lookahead.order_windows import REST_S
from cachesvc.core.model import RAM, Counted, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.node.retries import RETRY_CAP_S, backoff_s
from cachesvc.core.node.snapshot import replay
from cachesvc.core.tiering.copies import UNDECLARED
from cachesvc.core.tiering.policy import SMALL_FILLS, NodeSettings, TierSpec
from tests.support.core.node import (
    DATASET,
    NVME,
    ONE,
    OTHER,
    SIZE,
    THREE,
    TWO,
    A,
    B,
    C,
    D,
    E,
    F,
    declare,
    fill,
    node_of,
    read,
    tell,
)

NVME1 = TierName("nvme1")


def plan(*extents: ExtentId, number: int = 1, job: int = 1) -> Planned:
    return Planned(number, job, tuple((extent, step, step) for step, extent in enumerate(extents)))


def test_many_readers_of_one_cold_extent_cost_one_fill() -> None:
    node = node_of(ram=4)
    tell(node, declare(A))
    assert tell(node, Demanded(ONE, 7, A)) == [StartFill(A, RAM)]
    assert tell(node, Demanded(TWO, 8, A)) == []
    assert tell(node, Filled(A, RAM)) == [Grant(ONE, 7, A, RAM), Grant(TWO, 8, A, RAM)]
    assert tell(node, Demanded(THREE, 9, A)) == [Grant(THREE, 9, A, RAM)]
    counters = node.counters(DATASET)
    assert (counters.hits, counters.misses, counters.source_bytes) == (1, 2, SIZE)


def test_an_unknown_extent_fails_with_the_mend() -> None:
    (answer,) = tell(node_of(ram=1), Demanded(ONE, 7, A))
    assert isinstance(answer, Fail)
    assert answer.code == NotFound.code
    assert "open the dataset" in answer.message


def test_who_will_not_wait_is_answered_at_once_and_starts_nothing() -> None:
    node = node_of(ram=2)
    tell(node, declare(A))
    assert tell(node, Demanded(ONE, 1, A, wait=False)) == [Refuse(ONE, 1, A)]


def test_a_failed_fill_answers_all_waiters_and_the_next_demand_tries_again() -> None:
    node = node_of(ram=2)
    tell(node, declare(A), Demanded(ONE, 1, A), Demanded(TWO, 2, A))
    assert tell(node, FillFailed(A, RAM, 5, "torn")) == [
        Fail(ONE, 1, A, 5, "torn"),
        Fail(TWO, 2, A, 5, "torn"),
    ]
    assert tell(node, Demanded(ONE, 3, A)) == [StartFill(A, RAM)]


def test_a_fill_worth_retrying_keeps_its_waiters_until_the_attempts_are_spent() -> None:
    node = node_of(ram=2, max_attempts=2)
    code = SourceUnavailable.code
    tell(node, declare(A), Demanded(ONE, 1, A))
    assert tell(node, FillFailed(A, RAM, code, "503", retry=True)) == []
    due = node.next_deadline()
    assert tell(node, Tick(), now=due - 0.001) == []
    assert tell(node, Tick(), now=due) == [StartFill(A, RAM)]
    assert node.next_deadline() == math.inf
    assert tell(node, FillFailed(A, RAM, code, "503", retry=True)) == [Fail(ONE, 1, A, code, "503")]


def test_a_full_tier_sends_the_fill_to_another_one_and_is_tried_again_later() -> None:
    node = node_of(ram=2, nvme=1)
    tell(node, declare(A, B, C), Demanded(ONE, 1, A))
    assert tell(node, FillFailed(A, RAM, OutOfSpace.code, "full")) == [StartFill(A, NVME)]
    tell(node, Filled(A, NVME))
    assert tell(node, Demanded(ONE, 2, B)) == [Refuse(ONE, 2, B)]
    assert tell(node, Demanded(ONE, 3, C), now=60.0) == [StartFill(C, RAM)]


def test_a_tier_that_was_full_never_takes_more_than_it_was_given() -> None:
    node = node_of(ram=2)
    tell(node, declare(A, B, C), Demanded(ONE, 1, A), HoldReported(TWO, E, 5 * SIZE))
    tell(node, FillFailed(A, RAM, OutOfSpace.code, "no memory"))
    tell(node, ReaderGone(TWO), Prefetched(1, DATASET))
    assert node.status().tiers[0].budget_bytes <= 2 * SIZE


def test_a_full_disk_refuses_what_it_cannot_take_and_keeps_what_it_has() -> None:
    node = node_of(nvme=3)
    tell(node, declare(A, B), Demanded(ONE, 1, A), Filled(A, NVME), Committed(A, NVME))
    assert tell(node, Demanded(ONE, 2, B)) == [StartFill(B, NVME)]
    assert tell(node, FillFailed(B, NVME, OutOfSpace.code, "full")) == [Refuse(ONE, 2, B)]
    assert tell(node, Demanded(TWO, 3, A)) == [Grant(TWO, 3, A, NVME)]


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
def test_a_counter_never_goes_back_though_who_waits_is_refused(claimed: bool) -> None:
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


def test_a_lease_counts_and_a_dead_reader_frees_them_all() -> None:
    node = node_of(ram=1)
    read(node, A)
    tell(node, Demanded(ONE, 1, A), Demanded(ONE, 2, A), Released(ONE, A))
    assert tell(node, Demanded(TWO, 3, B, True, SIZE)) == [Refuse(TWO, 3, B)]
    tell(node, ReaderGone(ONE))
    assert tell(node, Demanded(TWO, 4, B, True, SIZE)) == [Evict(A, RAM)]


def test_undeclared_reads_give_way_oldest_first() -> None:
    node = node_of(ram=3)
    read(node, A, B, C, A)
    assert tell(node, Demanded(ONE, 1, D, True, SIZE)) == [Evict(B, RAM)]


def test_claimed_extents_are_kept_and_the_rest_streams_through_the_window() -> None:
    node = node_of(ram=3)
    tell(node, declare(A, B, C, D, E))
    read(node, A, B, C, D, E)
    assert [node.where(extent) for extent in (A, B, C, D, E)] == [RAM, RAM, None, None, RAM]
    read(node, D, C)
    assert node.where(A) == node.where(B) == RAM
    assert node.counters(DATASET).bound == pytest.approx(3 / 5)


def test_a_scan_that_nobody_declared_takes_nothing_from_what_is_kept_or_ahead() -> None:
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


def test_ram_fills_first_then_the_emptiest_nvme() -> None:
    node = Node([TierSpec(RAM, SIZE), TierSpec(NVME, 2 * SIZE), TierSpec(NVME1, 4 * SIZE)])
    started = tell(node, declare(A, B, C, D), Prefetched(1, DATASET))
    assert started == [StartFill(A, RAM), StartFill(B, NVME), StartFill(C, NVME1), StartFill(D, NVME1)]


def test_two_datasets_share_what_can_be_kept_by_size() -> None:
    node = node_of(ram=5)
    tell(node, declare(A, B, C, D))
    read(node, A, B, C, D)
    tell(node, declare(E, F, job=2, dataset=OTHER))
    read(node, E, F, E, F)
    kept = {name: node.counters(name).kept_bytes // SIZE for name in (DATASET, OTHER)}
    assert kept == {DATASET: 3, OTHER: 1}


def test_a_plan_fills_in_its_order_within_slots_and_budget_and_demands_go_first() -> None:
    node = node_of(ram=4, max_fills=2)
    assert tell(node, declare(A, B, C, D), plan(C, A, D, B)) == [StartFill(C, RAM), StartFill(A, RAM)]
    assert tell(node, Demanded(ONE, 1, B)) == []
    assert tell(node, Filled(C, RAM)) == [StartFill(B, RAM)]
    assert tell(node, Filled(A, RAM)) == [StartFill(D, RAM)]


def test_more_fills_than_slots_are_under_way_while_they_hold_few_bytes() -> None:
    node = node_of(ram=9, max_fills=1, fill_bytes=2 * SIZE)
    tell(node, declare(A, B, C, D))
    assert tell(node, *(Demanded(ONE, number, extent) for number, extent in enumerate((A, B, C), 1))) == [
        StartFill(A, RAM),
        StartFill(B, RAM),
    ]
    assert tell(node, Filled(B, RAM)) == [Grant(ONE, 2, B, RAM, "kept"), StartFill(C, RAM)]
    node = node_of(ram=9, max_fills=1, fill_bytes=9 * SIZE)
    tell(node, declare(A, B, C, D, E))
    wanted = [Demanded(ONE, number, extent) for number, extent in enumerate((A, B, C, D, E), 1)]
    assert len(tell(node, *wanted)) == SMALL_FILLS


def test_the_window_moves_with_the_plan() -> None:
    node = node_of(ram=3, lookahead_bytes=2 * SIZE)
    assert tell(node, declare(A, B, C, D, E), plan(A, B, C, D, E)) == [StartFill(A, RAM)]
    assert fill(node, A) == []
    assert tell(node, Demanded(ONE, 1, A), Passed(1, 1)) == [
        Grant(ONE, 1, A, RAM, "brief"),
        StartFill(B, RAM),
    ]
    fill(node, B)
    assert tell(node, Demanded(ONE, 2, B), Passed(1, 2)) == [
        Grant(ONE, 2, B, RAM, "brief"),
        StartFill(C, RAM),
    ]
    fill(node, C)
    assert tell(node, Released(ONE, B), Demanded(ONE, 3, C)) == [Grant(ONE, 3, C, RAM, "brief")]
    assert tell(node, Passed(1, 3)) == [Evict(B, RAM)]
    assert tell(node, Evicted(B, RAM)) == [StartFill(D, RAM)]
    assert node.where(A) == RAM, "kept"


@pytest.mark.parametrize(("now", "fetched"), [(REST_S - 1, 20), (REST_S, 1)], ids=["move", "rest"])
def test_orders_too_many_for_a_part_of_the_window_each_look_ahead_in_turn_unless_they_rest(
    now: float, fetched: int
) -> None:
    node = node_of(ram=12, lookahead_bytes=5 * SIZE, max_fills=8)
    every = [ExtentId(bytes([number]) * 16) for number in range(40)]
    orders = [every[number:] + every[:number] for number in (0, 10, 20)]
    claims = [declare(*every, job=job) for job in (1, 2, 3)]
    tell(node, *claims, Demanded(ONE, 0, every[5]), Filled(every[5], RAM), Released(ONE, every[5]))
    plans = [plan(*order, number=job, job=job) for job, order in enumerate(orders, start=1)]
    assert tell(node, *plans) == [StartFill(every[0], RAM), StartFill(every[10], RAM)]
    assert node.policy.reserve.ahead_bytes() == 2 * SIZE
    assert fill(node, every[0], every[10]) == []
    grant = Grant(ONE, 1, every[0], RAM, "brief")
    events = (Demanded(ONE, 1, every[0]), Passed(1, 1))
    assert tell(node, *events, now=now) == [grant, StartFill(every[fetched], RAM)]


@pytest.mark.parametrize("kept", [0, 7])
def test_what_orders_at_rest_have_ahead_gives_way_and_they_fetch_no_more_before_they_move(kept: int) -> None:
    node = node_of(ram=12, lookahead_bytes=5 * SIZE, max_fills=8)
    every = [ExtentId(bytes([number]) * 16) for number in range(60)]
    tell(node, *(declare(*every, job=job) for job in (1, 2, 3)))
    for number in range(50, 50 + kept):  # all that there is room to keep
        tell(node, Demanded(ONE, 0, every[number]), Filled(every[number], RAM), Released(ONE, every[number]))
    first, second, third = (every[number : number + 10] for number in (0, 10, 20))
    tell(node, plan(*first, number=1, job=1), plan(*second, number=2, job=2))
    fill(node, first[0], second[0])
    assert tell(node, plan(*third, number=3, job=3), now=REST_S - 1) == []
    assert node.policy.reserve.ahead_bytes() == 2 * SIZE
    fetched = [Evict(first[0], RAM)] * bool(kept) + [StartFill(third[0], RAM)]
    assert tell(node, plan(*third, number=3, job=3), now=REST_S) == fetched
    if kept:
        assert tell(node, Evicted(first[0], RAM), now=REST_S) == []
        assert tell(node, Demanded(ONE, 0, first[0]), now=REST_S) == [StartFill(first[0], RAM)]
    tell(node, Filled(third[0], RAM), *[Filled(first[0], RAM)] * bool(kept), now=REST_S)
    third_s = [Grant(THREE, 1, third[0], RAM, "brief"), StartFill(third[1], RAM)]
    assert tell(node, Demanded(THREE, 1, third[0]), Passed(3, 1), now=REST_S) == third_s
    assert StartFill(first[1], RAM) in tell(node, Passed(1, 1), now=REST_S), "it moves again"
    tell(node, Demanded(TWO, 1, second[0]), now=REST_S)
    assert node.counters(DATASET).ahead == (1 if kept else 2), (
        "what is kept stays, and is no hit all the same"
    )


@pytest.mark.parametrize(("quota", "most"), [(None, 20), (10, 10)])
def test_a_wide_window_leaves_others_half_of_the_cache_and_what_quotas_leave_them(
    quota: int | None, most: int
) -> None:
    node = node_of(ram=40, lookahead_bytes=None)
    large = [ExtentId(bytes([number]) * 16) for number in range(80)]
    small = [ExtentId(bytes([number]) * 16) for number in range(100, 120)]
    bytes_ = None if quota is None else quota * SIZE
    tell(node, declare(*small, job=2, dataset=OTHER))
    tell(node, DatasetDeclared(1, DATASET, tuple((each, SIZE) for each in large), 1000, bytes_))
    side_by_side = tuple((each, at // 30, at // 30) for at, each in enumerate(large))
    tell(node, Planned(1, 1, side_by_side))
    assert node.policy.tiers[RAM].reserve_bytes == most * SIZE
    tell(node, JobEnded(2))
    assert quota or node.policy.tiers[RAM].reserve_bytes == 35 * SIZE


def test_plans_that_wait_ask_for_no_tick_however_many_they_are() -> None:
    node = node_of(ram=12, lookahead_bytes=5 * SIZE)
    every = [ExtentId(bytes([number]) * 16) for number in range(2 * FEED_LIMIT)]
    node.handle(declare(*every), 0.0)
    for number in range(1, 2 * FEED_LIMIT):
        node.handle(plan(*every[number:], *every[:number], number=number), 0.0)
    while node.copies.filling:
        fill(node, *[copy.entry.id for copy in node.copies.filling])
    tell(node, Tick())
    assert node.next_deadline() > 0.0


def test_an_ended_plan_protects_nothing() -> None:
    node = node_of(ram=3, lookahead_bytes=2 * SIZE)
    tell(node, declare(A, B, C, D, E))
    read(node, A, B)
    assert tell(node, plan(C)) == [StartFill(C, RAM)]
    fill(node, C)
    assert tell(node, PlanEnded(1), plan(D, number=2)) == [Evict(C, RAM)]


def test_a_plan_may_name_any_step() -> None:
    node = node_of(ram=4, lookahead_bytes=3 * SIZE)
    far = Planned(1, 1, ((A, 0, 1 << 63), (B, 1 << 63, (1 << 64) - 1)))
    assert tell(node, declare(A, B, C, D, E, F), far) == [StartFill(A, RAM)]
    assert tell(node, Filled(A, RAM), Demanded(ONE, 1, A), Passed(1, 1 << 62)) == [
        Grant(ONE, 1, A, RAM, "brief"),
        StartFill(B, RAM),
    ]


def test_two_jobs_on_one_dataset_share_what_is_kept_and_the_last_frees_it() -> None:
    node = node_of(ram=3)
    tell(node, declare(A, B, C, D), declare(A, B, C, D, job=2))
    read(node, A, B, C)
    assert node.counters(DATASET).kept_bytes == 2 * SIZE
    tell(node, JobEnded(1))
    assert node.counters(DATASET).kept_bytes == 2 * SIZE
    tell(node, JobEnded(2))
    assert node.status().datasets == ()


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
def test_what_another_dataset_had_kept_is_kept_no_further_than_the_quota_of_the_next(
    pins: list[Event], kept: int
) -> None:
    node = node_of(ram=8)
    both = ((A, SIZE), (B, SIZE), (C, SIZE))
    tell(node, declare(A, B, C), DatasetDeclared(2, OTHER, both, 1000, None, SIZE))
    read(node, A, B, C)
    tell(node, *pins, Demanded(ONE, 1, C), JobEnded(1), Released(ONE, C))
    assert node.counters(OTHER).kept_bytes == kept * SIZE
    assert {node.where(each) for each in (A, B, C)} == {RAM}, "in room that is free"


@pytest.mark.parametrize("of", ["user", "data"])
def test_a_user_pins_no_more_than_its_quota_and_the_rest_gives_way(of: str) -> None:
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


def test_what_is_pinned_counts_for_whoever_pinned_it_and_after_that_for_whoever_claimed_it() -> None:
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


@pytest.mark.parametrize("gradual", [False, True])
def test_the_window_is_as_large_as_extents_of_claims_that_last_need_it(gradual: bool) -> None:
    node = node_of(ram=20, claim_step=1, lookahead_bytes=None)
    large = DatasetDeclared(1, OTHER, ((E, 5 * SIZE), (F, SIZE)), gradual=gradual)
    small = declare(A, B, C, job=2)
    tell(node, small)
    before = node.policy.reserve.window_bytes
    tell(node, large, *[Tick()] * 9)
    assert node.policy.reserve.window_bytes > before
    tell(node, JobEnded(1), *[Tick()] * 9)
    assert node.policy.reserve.window_bytes == before


def test_a_reader_holds_for_one_read_only_what_competes_for_the_window() -> None:
    node = node_of(ram=3)
    tell(node, declare(A, B, C, D, E), Planned(1, 1, tuple((each, 0, 9) for each in (A, B, C, D, E))))
    fill(node, A, B)
    assert read(node, A, B, C) == ["kept", "kept", "once"]
    calm = node_of(ram=3, lookahead_bytes=2 * SIZE)
    tell(calm, declare(A, B, C, D, E), plan(A, B, C, D, E))
    fill(calm, A)
    assert read(calm, A, B) == ["brief", "brief"]


def test_look_ahead_promotes_from_nvme_and_the_lower_copy_stays() -> None:
    node = node_of(ram=1, nvme=2)
    tell(node, Recovered(NVME, {A: SIZE, B: SIZE}))
    assert tell(node, declare(A, B), plan(A, B)) == [StartFill(A, RAM, NVME)]
    assert tell(node, EvictAsked(DATASET)) == [Evict(B, NVME)], "what is read from stays"
    fill(node, A)
    assert tell(node, Demanded(ONE, 1, A)) == [Grant(ONE, 1, A, RAM, "brief")]


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
def test_a_prefetch_that_is_broken_off_ends_though_others_claim_the_dataset(other: Event) -> None:
    node = node_of(ram=4, max_fills=1)
    assert tell(node, declare(A, B, C), Prefetched(1, DATASET), other) == [StartFill(A, RAM)]
    tell(node, JobEnded(1))
    assert fill(node, A) == []


def test_a_prefetch_goes_on_until_nobody_asks_for_it_and_lasts_when_it_is_done() -> None:
    node = node_of(ram=4, max_fills=1)
    tell(node, declare(A, B), declare(A, B, job=2), declare(A, B, job=3))
    tell(node, Prefetched(1, DATASET), Prefetched(2, DATASET), JobEnded(1))
    assert fill(node, A) == [StartFill(B, RAM)]
    fill(node, B)
    tell(node, JobEnded(2))
    assert tell(node, Corrupt(A, RAM), Evicted(A, RAM)) == [Evict(A, RAM), StartFill(A, RAM)]


def test_prefetches_that_displace_each_other_come_to_an_end() -> None:
    node = node_of(ram=4)
    todo = tell(node, declare(A, B, C), Prefetched(1, DATASET))
    todo += tell(node, declare(C, D, E, F, job=2, dataset=OTHER), Prefetched(2, OTHER))
    commands = 0
    while todo:
        command = todo.pop(0)
        commands += 1
        assert commands < 50
        if isinstance(command, StartFill):
            todo += fill(node, command.extent)
        elif isinstance(command, Evict):
            todo += tell(node, Evicted(command.extent, command.tier))
    assert node.progress(1).finished
    assert node.progress(2).finished


def test_a_prefetch_takes_to_nvme_what_loses_its_place_as_ram_shrinks() -> None:
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


def test_what_a_reader_held_as_ram_shrank_goes_to_nvme_in_the_place_of_what_nobody_claims() -> None:
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


def test_a_prefetch_says_what_has_no_room_in_another_tier_either_as_ram_shrinks() -> None:
    node = node_of(ram=2, nvme=2, lookahead_bytes=0)
    tell(node, Recovered(NVME, {E: SIZE}), declare(E, job=2, dataset=OTHER), declare(A, B))
    tell(node, Prefetched(1, DATASET))
    fill(node, A, B)
    assert tell(node, Resized(RAM, 0)) == [Evict(A, RAM), Evict(B, RAM), StartFill(A, NVME)]
    tell(node, Evicted(A, RAM), Evicted(B, RAM))
    fill(node, A, tier=NVME)
    assert (node.progress(1).finished, node.progress(1).stuck_extents) == (True, 1)


def test_recovered_extents_are_granted_and_what_exceeds_the_budget_goes() -> None:
    node = node_of(nvme=2)
    assert tell(node, Recovered(NVME, {A: SIZE, B: SIZE, C: SIZE})) == [Evict(A, NVME)]
    tell(node, Evicted(A, NVME))
    assert tell(node, Demanded(ONE, 1, B)) == [Grant(ONE, 1, B, NVME, "brief")]


def test_what_was_found_costs_no_record_until_it_is_named_and_goes_first() -> None:
    node = node_of(nvme=4)
    tell(node, Recovered(NVME, {A: SIZE, B: SIZE, C: SIZE}))
    assert [node.where(each) for each in (A, B, C, D)] == [NVME, NVME, NVME, None]
    assert not node.copies.entries
    assert node.status().tiers[0].used_bytes == 3 * SIZE
    tell(node, Demanded(ONE, 1, C), Released(ONE, C))
    assert set(node.copies.entries) == {C}
    assert tell(node, Demanded(ONE, 2, D, True, SIZE)) == [StartFill(D, NVME)]
    assert tell(node, Demanded(ONE, 3, E, True, SIZE)) == [Evict(A, NVME)], "before what was used since"
    assert set(node.copies.entries) == {A, C, D, E}
    tell(node, TierLost(NVME))
    assert node.where(B) is None


def test_one_extent_found_in_two_tiers_is_one_extent_with_two_copies() -> None:
    node = node_of(nvme=4, ram=4)
    tell(node, Recovered(NVME, {A: SIZE}), Recovered(RAM, {A: SIZE}))
    assert tell(node, EvictAsked(DATASET, (A,))) == [Evict(A, RAM), Evict(A, NVME)]


def test_bytes_held_from_before_a_restart_count_until_released() -> None:
    node = node_of(ram=2)
    tell(node, HoldReported(ONE, A, 3 * SIZE))
    assert tell(node, Demanded(TWO, 1, B, True, SIZE)) == [Refuse(TWO, 1, B)]
    tell(node, Released(ONE, A))
    assert tell(node, Demanded(TWO, 2, B, True, SIZE)) == [StartFill(B, RAM)]


def test_memory_that_two_readers_hold_counts_once() -> None:
    node = node_of(ram=2)
    tell(node, HoldReported(ONE, A, SIZE), HoldReported(TWO, A, SIZE))
    assert tell(node, Demanded(TWO, 1, B, True, SIZE)) == [StartFill(B, RAM)]
    tell(node, Released(ONE, A))
    assert [tier.held_bytes for tier in node.status().tiers] == [SIZE]
    tell(node, ReaderGone(TWO))
    assert [tier.held_bytes for tier in node.status().tiers] == [0]


def said(reader: ReaderId, extent: ExtentId, user: int, most: int) -> HoldReported:
    return HoldReported(reader, extent, SIZE, user, most * SIZE)


def held(node: Node) -> int:
    """In extents."""
    return node.policy.tiers[RAM].held_bytes // SIZE


def test_a_users_readers_together_are_believed_up_to_its_limit() -> None:
    node = node_of(ram=8)
    tell(node, said(ONE, A, 1000, 2), said(TWO, B, 1000, 2), said(TWO, C, 1000, 2))
    assert held(node) == 2
    tell(node, said(TWO, A, 1000, 2), said(ONE, B, 1000, 2))
    assert held(node) == 2, "the same memory"
    tell(node, said(THREE, D, 1001, 2))
    assert held(node) == 3, "another user"
    tell(node, Released(TWO, C), Released(ONE, B), Released(TWO, B), said(ONE, C, 1000, 2))
    assert held(node) == 3
    tell(node, ReaderGone(ONE), ReaderGone(TWO), ReaderGone(THREE))
    assert (held(node), node.readers.holds.held_bytes) == (0, {})


def test_all_users_together_are_believed_up_to_the_budget() -> None:
    node = node_of(ram=2)
    tell(node, said(ONE, A, 1000, 2), said(TWO, B, 1001, 2), said(THREE, C, 1002, 2))
    assert held(node) == 2
    tell(node, said(THREE, A, 1002, 2))
    assert held(node) == 2


def test_who_says_to_hold_what_it_never_had_takes_no_more_than_its_limit_of_what_others_keep() -> None:
    node = node_of(ram=6)
    tell(node, declare(A, B, C, D))
    read(node, A, B, C, D)
    commands = tell(node, *(said(TWO, ExtentId(bytes([number]) * 16), 1001, 3) for number in range(100, 164)))
    assert sum(isinstance(each, Evict) for each in commands) == 1


def test_the_release_of_what_was_not_believed_ends_no_lease() -> None:
    node = node_of(ram=2)
    tell(node, Demanded(ONE, 1, A, True, SIZE))
    fill(node, A)
    tell(node, said(ONE, A, 1000, 0), Released(ONE, A))
    assert tell(node, EvictAsked(DATASET, (A,))) == []
    tell(node, Released(ONE, A))
    assert tell(node, EvictAsked(DATASET, (A,))) == [Evict(A, RAM)]


def test_what_another_daemon_believed_is_believed_whenever_and_counts_for_its_user() -> None:
    node = node_of(ram=4)
    tell(node, Demanded(TWO, 1, E, True, SIZE))
    handed = HoldReported(ONE, A, 3 * SIZE, 1000)
    tell(node, handed, now=2 * NodeSettings().hold_s)
    assert held(node) == 3
    assert replay(node, ())[0] == handed
    early = node_of(ram=8)
    tell(early, handed, said(ONE, B, 1000, 3))
    assert held(early) == 3


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
    assert tell(node, Demanded(ONE, 3, C, True, SIZE)) == [Refuse(ONE, 3, C)]  # not into what is full
    later = 2 * node.policy.settings.full_s
    assert node.handle(Tick(), later) == []
    assert node.handle(Demanded(ONE, 4, C, True, SIZE), later) == [StartFill(C, NVME)]


def test_who_held_a_file_before_a_restart_is_asked_for_it_too() -> None:
    node = node_of(nvme=2)
    tell(node, Recovered(NVME, {A: SIZE}), declare(A), HoldReported(TWO, A, 0))
    assert Recall(TWO, A) in tell(node, Corrupt(A, NVME))
    assert tell(node, Released(TWO, A)) == []


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
    fill(node, A)  # ahead, from the disk
    assert tell(node, Corrupt(A, RAM)) == [Evict(A, RAM)]
    assert tell(node, Demanded(ONE, 1, A)) == [Grant(ONE, 1, A, NVME, "kept")]
    assert tell(node, Evicted(A, RAM)) == [], "no source is asked"
    assert tell(node, Demanded(TWO, 2, A)) == [Grant(TWO, 2, A, NVME, "kept")]


def test_a_corrupt_file_goes_and_is_filled_again_though_it_is_leased() -> None:
    node = node_of(nvme=2)
    tell(node, declare(A), Demanded(ONE, 1, A), Demanded(TWO, 2, A))
    fill(node, A, tier=NVME)
    assert tell(node, Corrupt(A, NVME)) == [Recall(ONE, A), Recall(TWO, A), Evict(A, NVME)]
    assert tell(node, Released(ONE, A), Demanded(ONE, 3, A)) == []
    assert tell(node, Evicted(A, NVME)) == [StartFill(A, NVME)]
    assert tell(node, Filled(A, NVME), Committed(A, NVME)) == [Grant(ONE, 3, A, NVME)]
    assert tell(node, Released(TWO, A), ReaderGone(TWO)) == []


def test_two_disks_bring_the_same_extent_and_the_first_has_no_room_for_it_any_more() -> None:
    node = Node([TierSpec(NVME, SIZE), TierSpec(NVME1, 2 * SIZE)], NodeSettings())
    assert tell(node, Recovered(NVME, {A: SIZE, B: SIZE})) == [Evict(A, NVME)]
    tell(node, Recovered(NVME1, {A: SIZE, C: SIZE}))
    assert tell(node, Demanded(ONE, 1, A)) == [Grant(ONE, 1, A, NVME1, "brief")]
    tell(node, Evicted(A, NVME))
    assert node.resident_in(NVME1) == {A, C}


def test_look_ahead_leaves_out_what_was_consumed_behind_an_extent_that_is_still_read() -> None:
    node = node_of(ram=4, max_fills=1)
    tell(node, declare(A, B, C), Demanded(ONE, 1, D, True, SIZE))
    tell(node, Planned(1, 1, ((A, 0, 20), (B, 1, 2), (C, 3, 12))), Passed(1, 10))
    assert fill(node, D) == [Grant(ONE, 1, D, RAM, "brief"), StartFill(A, RAM)]
    assert fill(node, A) == [StartFill(C, RAM)]
    tell(node, Filled(C, RAM), Passed(1, 30))
    (epoch,) = node.counters(DATASET).epochs
    assert (epoch.touched, epoch.hits) == (3, 1)


@pytest.mark.parametrize("held", [0, 2], ids=["too small", "held by readers"])
def test_what_does_not_fit_streams_through_a_disk_where_ram_has_no_room_for_an_extent(held: int) -> None:
    node = node_of(ram=held, nvme=3)
    tell(node, *(HoldReported(TWO, extent, SIZE) for extent in (E, F)[:held]), declare(A, B, C, D))
    for extent in (A, B, C, D, A, B, C, D):
        assert read(node, extent), "granted"


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
def test_readers_wait_for_no_room_of_a_tier_that_stalls(coming: str, stalls: bool) -> None:
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


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("counted", ["hits", "misses", "ahead"])
def test_what_could_not_be_handed_over_does_not_count_as_granted(counted: Counted, again: bool) -> None:
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


def test_pinned_extents_outlive_their_job_and_an_asked_eviction() -> None:
    node = node_of(ram=1)
    tell(node, declare(A))
    read(node, A)
    tell(node, Pinned(DATASET), JobEnded(1))
    assert tell(node, EvictAsked(DATASET)) == []
    assert tell(node, Demanded(ONE, 1, B, True, SIZE)) == [Refuse(ONE, 1, B)]


def test_what_is_pinned_stays_so_when_its_tier_was_lost_while_it_was_read() -> None:
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


def test_a_quota_counts_nothing_that_lies_in_a_lost_tier() -> None:
    node = Node([TierSpec(NVME, 4 * SIZE), TierSpec(NVME1, 4 * SIZE)], NodeSettings(lookahead_bytes=SIZE))
    tell(node, DatasetDeclared(1, DATASET, ((A, SIZE), (B, SIZE)), 1000, 2 * SIZE), Prefetched(1, DATASET))
    fill(node, A, tier=NVME)
    fill(node, B, tier=NVME1)
    assert tell(node, TierLost(NVME)) == [StartFill(A, NVME1)]
    fill(node, A, tier=NVME1)
    tell(node, TierBack(NVME))
    assert node.counters(DATASET).kept_bytes == 2 * SIZE
    assert node.progress(1).resident_extents == 2


def test_an_extent_that_fits_no_tier_takes_no_look_ahead_from_the_others() -> None:
    node = node_of(nvme=4, lookahead_bytes=None)
    small = (A, B, C, D, E)
    tell(node, DatasetDeclared(1, DATASET, (*((each, SIZE) for each in small), (F, 50 * SIZE))))
    assert tell(node, plan(*small)) == [StartFill(A, NVME)], "at its pace; once nothing at all"
    assert node.policy.reserve.largest_bytes == SIZE


def test_reads_and_epochs_count_for_the_dataset_that_their_job_claims() -> None:
    """`B` is of both, as where a folder and one folder in it are two datasets."""
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


def test_an_ended_job_leaves_its_extents_as_undeclared_ones() -> None:
    node = node_of(ram=1)
    tell(node, declare(A), declare(A, job=2))
    read(node, A)
    tell(node, JobEnded(1))
    assert node.counters(DATASET).kept_bytes == SIZE
    tell(node, JobEnded(2))
    assert tell(node, Demanded(ONE, 1, B, True, SIZE)) == [Evict(A, RAM)]


def test_nothing_is_remembered_of_what_is_neither_claimed_nor_resident() -> None:
    node = node_of(ram=1)
    tell(node, declare(A, B))
    read(node, A)
    tell(node, JobEnded(1), EvictAsked(DATASET, (A, B)), Evicted(A, RAM), ReaderGone(ONE))
    assert not node.copies.entries
    assert not node.readers.readers


def test_backoff_doubles_up_to_its_cap_and_differs_between_extents() -> None:
    delays = [backoff_s(attempt, A) for attempt in range(1, 40)]
    assert delays == sorted(delays)
    assert delays[-1] <= RETRY_CAP_S
    assert backoff_s(1, A) != backoff_s(1, B)


def test_long_after_the_start_nobody_held_anything_before_it() -> None:
    node = node_of(ram=2)
    node.handle(Demanded(ONE, 1, A, True, SIZE), 100.0)
    node.handle(HoldReported(TWO, B, 2 * SIZE, 1000, 2 * SIZE), 100.0 + NodeSettings().hold_s + 1.0)
    assert [tier.held_bytes for tier in node.status().tiers] == [0]
    node.handle(Released(TWO, B), 2000.0)  # its release is none of a lease
    node.check()


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
        node.check()
        ticks += 1
    assert ticks == 7  # three steps that claim, three that judge, and the end
    assert node.next_deadline() == math.inf
    assert node.status() == at_once.status()
    tell(node, JobEnded(1), Tick(), claim, Tick(), JobEnded(1))
    ticks = 0
    while not node.claims.claimed(DATASET):
        assert node.next_deadline() < math.inf
        tell(node, Tick())
        ticks += 1
    assert ticks == 4  # three steps that give up, and the end
    assert node.status().datasets == ()
    assert node.status().tiers[1].kept_bytes == 0


def test_a_claim_made_while_the_last_one_is_given_up_takes_it_up_again() -> None:
    extents = (A, B, C, D, E)
    claim = DatasetDeclared(1, DATASET, tuple((extent, SIZE) for extent in extents), gradual=True)
    node, new = (node_of(ram=5, nvme=5, claim_step=2) for _ in range(2))
    for each in (node, new):
        tell(each, Recovered(NVME, {A: SIZE, E: SIZE}), declare(*extents, job=7))
    tell(node, JobEnded(7), Tick(), Pinned(DATASET), claim, JobEnded(1), Tick(), claim)
    tell(new, claim, JobEnded(7))
    while not node.claims.claimed(DATASET):
        tell(node, Tick())
    assert node.status() == new.status()
    tell(node, JobEnded(1), *(Tick() for _ in range(4)))
    assert node.claims.claimed(DATASET)
    assert node.status().datasets == ()


def test_who_needs_all_of_a_gradual_claim_has_it_at_once_or_waits() -> None:
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


def test_a_prefetch_gives_up_what_a_full_tier_refused_to_a_reader() -> None:
    node = Node([TierSpec(RAM, 10)], NodeSettings())
    node.handle(DatasetDeclared(1, DATASET, ((A, 10),)), 0.0)
    assert node.handle(Demanded(ReaderId(1), 1, A), 0.0) == [StartFill(A, RAM)]
    node.handle(Prefetched(1, DATASET), 1.0)
    answers = node.handle(FillFailed(A, RAM, 8, "the disk is full"), 2.0)
    assert answers == [Refuse(ReaderId(1), 1, A)]
    assert node.progress(1).stuck_extents == 1, "else the prefetch would never end"


@pytest.mark.parametrize("loss", [Corrupt(A, NVME), TierLost(NVME)], ids=["corrupt", "lost"])
def test_what_a_prefetch_loses_while_it_is_read_ahead_is_filled_again(loss: Event) -> None:
    node = node_of(ram=4, nvme=4)
    assert tell(node, Recovered(NVME, {A: SIZE}), declare(A), plan(A, number=2, job=2)) == [
        StartFill(A, RAM, NVME)
    ]
    tell(node, Prefetched(1, DATASET), loss)
    assert StartFill(A, RAM) in tell(node, FillFailed(A, RAM, SourceUnavailable.code, "torn", retry=True))
    assert not node.progress(1).finished
    fill(node, A)
    assert node.progress(1).resident_extents == 1


def test_a_prefetch_fills_elsewhere_what_a_lost_tier_was_taking() -> None:
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


def test_a_prefetch_has_what_a_reader_who_left_waited_to_be_tried_again() -> None:
    node = node_of(ram=4, max_fills=1)
    assert tell(node, declare(A, B), Demanded(ONE, 1, A), Prefetched(1, DATASET)) == [StartFill(A, RAM)]
    failed = FillFailed(A, RAM, SourceUnavailable.code, "busy", retry=True)
    assert tell(node, failed, Demanded(TWO, 2, B)) == [StartFill(B, RAM)]
    assert tell(node, Tick(), now=RETRY_CAP_S) == [], "the only slot is taken"
    tell(node, ReaderGone(ONE), now=RETRY_CAP_S)
    assert StartFill(A, RAM) in tell(node, Filled(B, RAM), now=RETRY_CAP_S)
    tell(node, Filled(A, RAM), now=RETRY_CAP_S)
    assert node.progress(1).finished


def test_what_a_peer_gave_costs_the_source_nothing_and_its_grants_say_so() -> None:
    node = node_of(ram=4)
    tell(node, DatasetDeclared(1, DATASET, ((A, SIZE), (B, SIZE))), Demanded(ONE, 1, A), Demanded(ONE, 2, B))
    assert tell(node, Filled(A, RAM, from_peer=True)) == [Grant(ONE, 1, A, RAM, from_peer=True)]
    assert tell(node, Filled(B, RAM)) == [Grant(ONE, 2, B, RAM)]
    assert node.counters(DATASET).source_bytes == SIZE
    tell(node, Released(ONE, A), Corrupt(A, RAM), Evicted(A, RAM), Demanded(ONE, 3, A))
    assert Grant(ONE, 3, A, RAM) in tell(node, Filled(A, RAM))
