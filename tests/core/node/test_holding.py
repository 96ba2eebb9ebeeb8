"""Readers that hold extents neither keep other jobs waiting nor hold memory that is needed elsewhere."""

from __future__ import annotations

import pytest

from cachesvc.core import events as ev
from cachesvc.core.model import RAM
from cachesvc.core.node.reclaim import INTERVAL_S
from cachesvc.simulate.simulated_node import RECALL_DELAY_S
from tests.support.core.holders import NVME, SIZE, Jobs, Reader

SOON_S = 2 * (INTERVAL_S + RECALL_DELAY_S)
ROOM = 64


def idle_job(jobs: Jobs, count: int = ROOM) -> Reader:
    """A job that has read all of its data, which fills the cache, and holds it."""
    first = Reader(jobs, 1, "first", count, user=1)
    first.read(1)
    jobs.wait(10.0)
    assert len(first.holding.held) == count
    return first


def gets_its_share(jobs: Jobs, number: int = 2) -> Reader:
    """A job that begins later, reads on, and never waits long."""
    second = Reader(jobs, number, "second", 2 * ROOM, user=number)
    second.read(100)
    jobs.until(lambda: second.epoch > 0, 30.0)
    assert max(second.waits) < SOON_S
    assert second.kept >= int(second.share) - 1
    return second


def test_a_reader_holds_kept_extents_and_demands_them_no_more() -> None:
    jobs = Jobs(ROOM)
    first = idle_job(jobs)
    first.read(2)
    jobs.wait(20.0)
    assert first.epoch == 3
    assert jobs.node.counters(first.dataset).hits == 0, "it has it"


def test_a_job_gets_its_share_beside_one_that_holds_everything() -> None:
    jobs = Jobs(ROOM)
    first = idle_job(jobs)
    gets_its_share(jobs)
    assert first.kept >= first.share


@pytest.mark.parametrize("nvme", [0, ROOM])
def test_a_tier_that_shrinks_gets_back_what_readers_hold(nvme: int) -> None:
    """The kernel cannot reclaim memory that readers map: without recalls, a trainer would be killed."""
    jobs = Jobs(ROOM, nvme)
    first = idle_job(jobs)
    ram = jobs.node.policy.tiers[RAM]
    jobs.send(ev.Resized(RAM, 20 * SIZE))
    jobs.wait(SOON_S)
    assert ram.used_bytes == 20 * SIZE, "as much as fits, and no less"
    assert len(first.holding.held) == 20


def test_a_tier_that_shrinks_just_after_a_recall_sends_another_by_itself() -> None:
    jobs = Jobs(ROOM)
    idle_job(jobs)
    jobs.send(ev.Resized(RAM, 60 * SIZE))
    jobs.send(ev.Resized(RAM, 20 * SIZE))
    jobs.wait(SOON_S)
    assert jobs.node.policy.tiers[RAM].used_bytes == 20 * SIZE


def test_a_tier_that_shrinks_leaves_pinned_extents_and_stops_sending_recalls() -> None:
    jobs = Jobs(ROOM)
    first = idle_job(jobs)
    jobs.send(ev.Pinned(first.dataset))
    jobs.send(ev.Resized(RAM, 20 * SIZE))
    jobs.wait(SOON_S)
    assert not jobs.recalls
    assert jobs.node.next_deadline() == float("inf")


def test_extents_pinned_beyond_a_quota_are_evicted_though_readers_hold_them() -> None:
    jobs = Jobs(ROOM)
    first = idle_job(jobs)
    jobs.send(ev.Pinned(first.dataset, False, 99, None, 16 * SIZE))
    gets_its_share(jobs)
    assert first.kept == 16


def test_extents_held_while_a_pin_within_a_quota_ends_are_kept_again() -> None:
    jobs = Jobs(ROOM)
    first = idle_job(jobs)
    jobs.send(ev.Pinned(first.dataset, False, 99, None, 16 * SIZE))
    assert first.kept == 16
    jobs.send(ev.Unpinned(first.dataset))
    assert first.kept == ROOM


def test_extents_held_while_a_tier_was_lost_for_a_moment_are_kept_again_and_shared() -> None:
    jobs = Jobs(1, ROOM)
    first = idle_job(jobs)
    jobs.send(ev.TierLost(NVME))
    assert first.kept == 1
    jobs.send(ev.TierBack(NVME))
    assert first.kept == ROOM
    gets_its_share(jobs)


def test_extents_held_from_before_a_restart_are_recalled() -> None:
    """Otherwise a job that holds all memory and needs no more would leave others nothing for as long as it runs."""
    jobs = Jobs(ROOM)
    first = Reader(jobs, 1, "first", ROOM, user=1)
    for extent in first.extents:
        jobs.send(ev.HoldReported(first.number, extent, SIZE, first.user))
        first.holding.granted(extent, "kept")
    first.read(1)
    gets_its_share(jobs)
    jobs.until(lambda: first.epoch == 1, 30.0)


def test_no_more_holds_from_before_a_restart_are_recalled_than_others_need() -> None:
    jobs = Jobs(ROOM)
    first = Reader(jobs, 1, "first", ROOM, user=1)
    for extent in first.extents:
        jobs.send(ev.HoldReported(first.number, extent, SIZE, first.user))
        first.holding.granted(extent, "kept")
    second = Reader(jobs, 2, "second", ROOM, user=2)
    second.read(100)
    jobs.wait(20.0)
    assert len(first.holding.held) == pytest.approx(ROOM / 2, abs=2)
    jobs.send(ev.Resized(RAM, 20 * SIZE))
    jobs.wait(SOON_S)
    ram = jobs.node.policy.tiers[RAM]
    assert ram.used_bytes + ram.held_bytes <= 20 * SIZE


def test_a_stopped_process_leaves_the_others_what_it_does_not_hold() -> None:
    """The process never answers. The last job has the least room, and never waits long."""
    jobs = Jobs(60)
    first = Reader(jobs, 1, "first", 30, user=1)
    second = Reader(jobs, 2, "second", 30, user=2)
    first.read(1)
    second.read(1000)
    jobs.wait(10.0)
    first.stopped = True
    third = Reader(jobs, 3, "third", 30, user=3)
    third.read(1000)
    jobs.wait(30.0)
    assert first.kept == 30
    assert second.kept + third.kept >= 26
    assert third.kept >= second.kept / 2
    assert max(third.waits) < SOON_S
    first.end()
    jobs.wait(20.0)
    assert third.kept >= 28, "all of the rest"


def test_a_job_that_ends_while_another_waits_leaves_it_all_of_the_room() -> None:
    jobs = Jobs(ROOM)
    first = idle_job(jobs)
    second = Reader(jobs, 2, "second", 2 * ROOM, user=2)
    second.read(100)
    jobs.wait(0.5)
    first.end()
    jobs.until(lambda: second.kept >= ROOM - 2, 10.0)
    assert max(second.waits) < SOON_S


def test_windows_of_many_jobs_go_on_beside_one_that_holds_everything() -> None:
    jobs = Jobs(40)
    idle_job(jobs, 40)
    others = [Reader(jobs, number, f"data {number}", 200, user=number) for number in range(2, 6)]
    for each in others:
        each.read(100)
    jobs.wait(30.0)
    for each in others:
        assert each.epoch >= 1
        assert max(each.waits) < SOON_S
        assert sum(each.waits) < 0.2 * 30.0
