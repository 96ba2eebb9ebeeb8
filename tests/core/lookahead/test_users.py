"""Look-ahead that the plans of one user leave to another."""

from __future__ import annotations

import pytest

from cachesvc.core import events as ev
from tests.support.core.holders import Jobs, Reader
from tests.support.core.invariants import check

ALICE, BOB = 1001, 1002
CACHE, EXTENTS = 64, 300
STEP_S, OTHERS_STEP_S = 0.02, 0.5


class Users:
    """A cache of 64 extents, and plans of two users, each over a dataset of its own."""

    def __init__(self) -> None:
        self.jobs = Jobs(CACHE)
        self.alice = Reader(self.jobs, 1, "alices", EXTENTS, ALICE, STEP_S)

    def plans(self, count: int, idle: bool) -> None:
        """Begin that many plans of Bob, each in an order of its own."""
        for number in range(2, count + 2):
            reader = Reader(self.jobs, number, "bobs", EXTENTS, BOB, OTHERS_STEP_S)
            reader.stopped = idle
            reader.read(1)

    def streamed(self) -> int:
        """Read all of Alice's dataset; how many extents were fetched ahead."""
        self.alice.read(1)
        self.jobs.until(lambda: self.alice.epoch == 1, 120.0)
        check(self.jobs.node)
        return self.jobs.node.counters(self.alice.dataset).ahead


@pytest.mark.parametrize(("count", "least"), [(8, 290), (40, 190), (60, 190), (100, 190)])
def test_idle_plans_of_one_user_leave_another_its_look_ahead(count: int, least: int) -> None:
    users = Users()
    users.plans(count, idle=True)
    users.jobs.wait(60.0)
    assert users.streamed() >= least


@pytest.mark.parametrize("count", [8, pytest.param(60, marks=pytest.mark.slow)])
def test_moving_plans_of_one_user_leave_another_its_look_ahead(count: int) -> None:
    users = Users()
    users.plans(count, idle=False)
    users.jobs.wait(5.0)
    assert users.streamed() >= 220


def test_plans_of_two_users_have_windows_of_their_own_though_they_begin_alike() -> None:
    jobs = Jobs(CACHE)
    for number, user in ((2, ALICE), (3, ALICE), (4, BOB)):
        reader = Reader(jobs, number, "data", EXTENTS, user)
        jobs.send(
            ev.Planned(
                number, number, tuple((each, at, at) for at, each in enumerate(reader.extents)), user=user
            )
        )
    plans = jobs.node.plans.plans
    assert plans[2].window is plans[3].window is not plans[4].window
