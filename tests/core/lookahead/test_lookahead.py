"""Look-ahead: windows, cursors and promotions of plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cachesvc.core.commands import Evict, Grant, StartFill
from cachesvc.core.events import (
    DatasetDeclared,
    Demanded,
    EvictAsked,
    Evicted,
    Filled,
    HoldReported,
    JobEnded,
    Passed,
    PlanEnded,
    Planned,
    Recovered,
    Released,
    Tick,
)
from cachesvc.core.lookahead.lookahead import FEED_LIMIT, LARGE_BYTES
from cachesvc.core.lookahead.order_windows import IDLE_S
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.tiering.policy import SMALL_FILLS
from tests.support.core.instant import carry_out
from tests.support.core.names import DATASET, NVME, ONE, OTHER, SIZE, THREE, TWO, A, B, C, D, E, F
from tests.support.core.node import declare, fill, node_of, plan, read, tell


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


@pytest.mark.parametrize(("now", "fetched"), [(IDLE_S - 1, 20), (IDLE_S, 1)], ids=["move", "rest"])
def test_orders_too_many_for_the_window_look_ahead_in_turn_unless_they_are_idle(
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
def test_idle_orders_give_up_what_they_fetched_ahead_and_fetch_no_more_before_they_move(kept: int) -> None:
    node = node_of(ram=12, lookahead_bytes=5 * SIZE, max_fills=8)
    every = [ExtentId(bytes([number]) * 16) for number in range(60)]
    tell(node, *(declare(*every, job=job) for job in (1, 2, 3)))
    for number in range(50, 50 + kept):  # all that there is room to keep
        tell(node, Demanded(ONE, 0, every[number]), Filled(every[number], RAM), Released(ONE, every[number]))
    first, second, third = (every[number : number + 10] for number in (0, 10, 20))
    tell(node, plan(*first, number=1, job=1), plan(*second, number=2, job=2))
    fill(node, first[0], second[0])
    assert tell(node, plan(*third, number=3, job=3), now=IDLE_S - 1) == []
    assert node.policy.reserve.ahead_bytes() == 2 * SIZE
    fetched = [Evict(first[0], RAM)] * bool(kept) + [StartFill(third[0], RAM)]
    assert tell(node, plan(*third, number=3, job=3), now=IDLE_S) == fetched
    if kept:
        assert tell(node, Evicted(first[0], RAM), now=IDLE_S) == []
        assert tell(node, Demanded(ONE, 0, first[0]), now=IDLE_S) == [StartFill(first[0], RAM)]
    tell(node, Filled(third[0], RAM), *[Filled(first[0], RAM)] * bool(kept), now=IDLE_S)
    third_s = [Grant(THREE, 1, third[0], RAM, "brief"), StartFill(third[1], RAM)]
    assert tell(node, Demanded(THREE, 1, third[0]), Passed(3, 1), now=IDLE_S) == third_s
    assert StartFill(first[1], RAM) in tell(node, Passed(1, 1), now=IDLE_S), "it moves again"
    tell(node, Demanded(TWO, 1, second[0]), now=IDLE_S)
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


def test_waiting_plans_ask_for_no_tick() -> None:
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


def test_look_ahead_promotes_from_nvme_and_the_lower_copy_stays() -> None:
    node = node_of(ram=1, nvme=2)
    tell(node, Recovered(NVME, {A: SIZE, B: SIZE}))
    assert tell(node, declare(A, B), plan(A, B)) == [StartFill(A, RAM, NVME)]
    assert tell(node, EvictAsked(DATASET)) == [Evict(B, NVME)], "what is read from stays"
    fill(node, A)
    assert tell(node, Demanded(ONE, 1, A)) == [Grant(ONE, 1, A, RAM, "brief")]


def test_look_ahead_skips_rows_consumed_behind_an_extent_that_is_still_read() -> None:
    node = node_of(ram=4, max_fills=1)
    tell(node, declare(A, B, C), Demanded(ONE, 1, D, True, SIZE))
    tell(node, Planned(1, 1, ((A, 0, 20), (B, 1, 2), (C, 3, 12))), Passed(1, 10))
    assert fill(node, D) == [Grant(ONE, 1, D, RAM, "brief"), StartFill(A, RAM)]
    assert fill(node, A) == [StartFill(C, RAM)]
    tell(node, Filled(C, RAM), Passed(1, 30))
    (epoch,) = node.counters(DATASET).epochs
    assert (epoch.touched, epoch.hits) == (3, 1)


@pytest.mark.parametrize("held", [0, 2], ids=["too small", "held by readers"])
def test_data_that_does_not_fit_streams_through_a_disk_where_ram_has_no_room_for_an_extent(held: int) -> None:
    node = node_of(ram=held, nvme=3)
    tell(node, *(HoldReported(TWO, extent, SIZE) for extent in (E, F)[:held]), declare(A, B, C, D))
    for extent in (A, B, C, D, A, B, C, D):
        assert read(node, extent), "granted"


def test_an_extent_that_fits_no_tier_takes_no_look_ahead_from_the_others() -> None:
    node = node_of(nvme=4, lookahead_bytes=None)
    small = (A, B, C, D, E)
    tell(node, DatasetDeclared(1, DATASET, (*((each, SIZE) for each in small), (F, 50 * SIZE))))
    assert tell(node, plan(*small)) == [StartFill(A, NVME)], "at its pace; once nothing at all"
    assert node.policy.reserve.largest_bytes == SIZE


def tiers_read(sample_bytes: int, ram: int, windows: int = 12, size: int = 2, kept: int = 0) -> list[str]:
    """The tiers that grant each extent of an order, in which windows of `size` extents are read one after the other. All
    lie on NVMe, and fills end before the next step. RAM has kept `kept` extents of other data since before the order."""
    node = node_of(ram=ram, nvme=2 * windows * size, lookahead_bytes=None)
    others = [ExtentId(bytes([255 - number]) * 16) for number in range(kept)]
    tell(node, declare(*others, job=2, dataset=OTHER))
    read(node, *others)
    tell(node, *(Released(ONE, each) for each in others))
    extents = [ExtentId(bytes([number]) * 16) for number in range(windows * size)]
    tell(node, Recovered(NVME, dict.fromkeys(extents, SIZE)))
    rows = tuple((each, 10 * (n // size), 10 * (n // size) + 9) for n, each in enumerate(extents))
    claim = DatasetDeclared(1, DATASET, tuple((each, SIZE) for each in extents), sample_bytes=sample_bytes)
    commands = tell(node, claim, Planned(1, 1, rows))
    tiers: list[str] = []
    for window in range(windows):
        for step in range(10):
            while fills := [each for each in commands if isinstance(each, StartFill)]:
                evicted = [Evicted(each.extent, each.tier) for each in commands if isinstance(each, Evict)]
                commands = tell(node, *evicted, *(Filled(each.extent, each.tier) for each in fills))
            evicted = [Evicted(each.extent, each.tier) for each in commands if isinstance(each, Evict)]
            commands = tell(node, *evicted, Passed(1, 10 * window + step))
            if step == 0:
                now = extents[window * size : window * size + size]
                for number, extent in enumerate(now):
                    answers = tell(node, Demanded(ONE, 100 * window + number, extent))
                    tiers += [each.tier for each in answers if isinstance(each, Grant)]
                    commands += [each for each in answers if not isinstance(each, Grant)]
            if step == 1 and window:
                before = extents[(window - 1) * size : window * size]
                commands += tell(node, *(Released(ONE, each) for each in before))
    assert len(tiers) == len(extents)
    return tiers


def test_small_samples_on_nvme_are_read_from_a_window_of_ram_that_moves_with_the_plan() -> None:
    tiers = tiers_read(3_000, ram=8)
    assert tiers[2:] == [RAM] * (len(tiers) - 2)


def test_the_window_moves_with_the_plan_beside_extents_that_were_kept_before_it() -> None:
    """RAM has room for six extents beside them, and windows have four: two of the next are copied before it is due, then
    all of the one after."""
    tiers = tiers_read(3_000, ram=12, size=4, kept=6)
    assert tiers == [*[NVME] * 4, *[*[RAM] * 6, *[NVME] * 2] * 5, *[RAM] * 4]


def test_what_is_due_is_not_copied_since_its_reader_has_opened_the_file() -> None:
    node = node_of(ram=4, nvme=9, lookahead_bytes=None)
    extents = (A, B, C, D, E, F)
    tell(node, Recovered(NVME, dict.fromkeys(extents, SIZE)))
    tell(node, DatasetDeclared(1, DATASET, tuple((each, SIZE) for each in extents), sample_bytes=3_000))
    rows = ((A, 0, 9), (B, 0, 9), (C, 10, 19), (D, 10, 19), (E, 20, 29), (F, 20, 29))
    assert tell(node, Planned(1, 1, rows)) == [StartFill(C, RAM, NVME), StartFill(D, RAM, NVME)]


def test_small_samples_stay_leased_in_ram_where_no_window_moves() -> None:
    """Otherwise every batch of an order without windows would lease them anew."""
    node = node_of(ram=4, nvme=9, lookahead_bytes=None)
    extents = (A, B, C, D, E, F)
    tell(node, Recovered(NVME, dict.fromkeys(extents, SIZE)))
    tell(node, DatasetDeclared(1, DATASET, tuple((each, SIZE) for each in extents), sample_bytes=3_000))
    tell(node, Planned(1, 1, tuple((each, 10 * n, 10 * n + 9) for n, each in enumerate(extents))))
    fill(node, B)
    assert tell(node, Demanded(ONE, 1, B)) == [Grant(ONE, 1, B, RAM, "brief")]
    tell(node, PlanEnded(1), Released(ONE, B), Planned(1, 1, tuple((each, 0, 99) for each in extents)))
    assert tell(node, Demanded(ONE, 2, B)) == [Grant(ONE, 2, B, RAM, "kept")]


def test_large_samples_are_read_from_nvme() -> None:
    assert tiers_read(100_000, ram=8).count(RAM) < 12


def test_ram_without_room_for_what_is_read_side_by_side_keeps_a_part() -> None:
    assert tiers_read(3_000, ram=1, size=2).count(RAM) < 12


def test_beside_small_samples_large_ones_stay_on_nvme() -> None:
    node = node_of(ram=3, nvme=9, lookahead_bytes=None)
    tell(node, Recovered(NVME, dict.fromkeys((A, B, C, D), SIZE)))
    small = DatasetDeclared(1, DATASET, ((A, SIZE), (B, SIZE)), sample_bytes=3_000)
    large = DatasetDeclared(2, OTHER, ((C, SIZE), (D, SIZE)), sample_bytes=100_000)
    assert tell(node, small, large, Planned(2, 2, ((C, 0, 9), (D, 0, 9)))) == []
    assert tell(node, Planned(1, 1, ((A, 0, 9), (B, 0, 9)))) == [
        StartFill(A, RAM, NVME),
        StartFill(B, RAM, NVME),
    ]
    assert tell(node, Demanded(ONE, 1, C)) == [Grant(ONE, 1, C, NVME, "kept")]


def test_a_plan_goes_on_past_extents_that_were_demanded_while_it_reads_them() -> None:
    node = node_of(ram=9, lookahead_bytes=SIZE)
    carry_out(node, declare(A, B, C, D), *(Demanded(ONE, n, each) for n, each in enumerate((A, B, C))))
    rows = ((A, 0, 9), (B, 0, 9), (C, 1, 9), (D, 10, 19))
    assert tell(node, Planned(1, 1, rows)) == [StartFill(D, RAM)]


def test_the_end_of_an_epoch_fetches_the_first_window_of_the_next_one() -> None:
    node = node_of(ram=9, lookahead_bytes=2 * SIZE)
    tell(node, declare(A, B, C, D))
    carry_out(node, replace(plan(A, B), following=(C, D, A)))
    for number, extent in enumerate((A, B), 1):
        carry_out(node, Demanded(ONE, number, extent), Passed(1, number), Released(ONE, extent))
    assert [node.where(each) for each in (C, D)] == [RAM, RAM]
    assert tell(node, plan(C, D, A), now=1.0) == [], "taken over"
    carry_out(node, Demanded(ONE, 3, C), Released(ONE, C), now=1.0)
    carry_out(node, Passed(1, 1), now=1.0)
    before, now = node.counters(DATASET).epochs
    assert (before.touched, before.hits, now.touched, now.hits) == (2, 0, 1, 0)


def test_the_end_of_an_epoch_fetches_nothing_more_where_the_data_does_not_fit() -> None:
    """F is kept, so that the others stream through the window at an even rate."""
    node = node_of(ram=3, lookahead_bytes=2 * SIZE)
    tell(node, declare(A, B, C, D, F))
    read(node, F)
    carry_out(node, replace(plan(A, B), following=(C, D, A)))
    carry_out(node, Demanded(ONE, 1, A), Passed(1, 1), Released(ONE, A))
    assert StartFill(C, RAM) not in carry_out(node, Demanded(ONE, 2, B), Passed(1, 2), Released(ONE, B))
    assert StartFill(C, RAM) in carry_out(node, plan(C, D, A), now=1.0)


def test_the_end_of_an_epoch_copies_the_first_window_of_the_next_one_from_nvme() -> None:
    node = node_of(ram=4, nvme=9, lookahead_bytes=None)
    extents = (A, B, C, D, E, F)
    tell(node, Recovered(NVME, dict.fromkeys(extents, SIZE)))
    tell(node, DatasetDeclared(1, DATASET, tuple((each, SIZE) for each in extents), sample_bytes=3_000))
    rows = tuple((each, at // 2 * 10, at // 2 * 10 + 9) for at, each in enumerate(extents))
    carry_out(node, Planned(1, 1, rows, (B, A)))
    for step in (10, 20, 30):
        carry_out(node, Passed(1, step))
    carry_out(node, Planned(1, 1, ((B, 0, 9), (A, 0, 9), *rows[2:])))
    assert [node.where(each) for each in (A, B)] == [RAM, RAM]


def test_rows_of_this_epoch_take_the_room_of_another_plans_next_one() -> None:
    node = node_of(ram=4, nvme=9, lookahead_bytes=None)
    trained, validated = (A, B, C, D), (E, F)
    tell(node, Recovered(NVME, dict.fromkeys((*trained, *validated), SIZE)))
    for job, dataset, extents in ((1, DATASET, trained), (2, OTHER, validated)):
        sizes = tuple((each, SIZE) for each in extents)
        tell(node, DatasetDeclared(job, dataset, sizes, sample_bytes=3_000))
    rows = tuple((each, at // 2 * 10, at // 2 * 10 + 9) for at, each in enumerate(trained))
    carry_out(node, Planned(1, 1, rows, trained))
    carry_out(node, Passed(1, 20))
    assert [node.where(each) for each in trained] == [RAM] * 4, "the next epoch's first window"
    carry_out(node, Planned(2, 2, ((E, 1, 9), (F, 1, 9))))
    assert [node.where(each) for each in validated] == [RAM, RAM]


def test_large_extents_come_after_those_of_the_first_step() -> None:
    node = node_of(ram=10 * LARGE_BYTES // SIZE)
    tell(node, DatasetDeclared(1, DATASET, tuple((each, LARGE_BYTES) for each in (A, B, C, D))))
    rows = ((A, 0, 9), (B, 0, 9), (C, 10, 19), (D, 20, 29))
    assert tell(node, Planned(1, 1, rows)) == [StartFill(A, RAM), StartFill(B, RAM)]
    assert fill(node, A) == []
    assert fill(node, B) == [StartFill(C, RAM), StartFill(D, RAM)]


def test_two_plans_that_have_ended_an_epoch_both_fetch_the_next_one() -> None:
    node = node_of(ram=20, lookahead_bytes=4 * SIZE)
    every = [ExtentId(bytes([number]) * 16) for number in range(20)]
    tell(node, declare(*every))
    for number in (1, 2):
        carry_out(node, replace(plan(every[number], number=number), following=every[5 * number :][:3]))
        carry_out(node, Passed(number, 1))
    assert node.where(every[5])
    assert node.where(every[10])
