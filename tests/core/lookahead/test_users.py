"""Look-ahead that the plans of one user leave to another."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import pytest

from cachesvc.core.commands import Evict, Grant, Refuse, StartFill
from cachesvc.core.events import (
    DatasetDeclared,
    Demanded,
    Event,
    Evicted,
    Filled,
    Passed,
    Planned,
    Released,
    Tick,
)
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.simulate.clock import Clock
from tests.support.core.invariants import check

ALICE, BOB = 1001, 1002
SIZE, CACHE = 10, 64
FILL_S, STEP_S, OTHERS_STEP_S = 0.015, 0.02, 0.5


class Users:
    """A cache of 64 extents. Plans of two users, each over a dataset of its own and in an order of its own, each read
    extent by extent, under a virtual clock."""

    def __init__(self, users: tuple[int, int] = (ALICE, BOB)) -> None:
        self.node = Node([TierSpec(RAM, CACHE * SIZE)], NodeSettings())
        self.clock = Clock()
        self.alice, self.bob = users
        self.log: list[object] = []
        self.data = [[ExtentId(at.to_bytes(16, "big")) for at in range(n, n + 300)] for n in (0, 1000)]
        for number, extents in enumerate(self.data):
            job, name = 10_000 + number, DatasetId(str(number))
            self.send(DatasetDeclared(job, name, tuple((each, SIZE) for each in extents), users[number]))
        self._held: dict[int, ExtentId] = {}
        self._wants: dict[int, Callable[[], None]] = {}
        self._ticks = False

    def send(self, event: Event) -> None:
        for command in self.node.handle(event, self.clock.now):
            self.log.append((self.clock.now, command))
            if isinstance(command, StartFill):
                self.later(FILL_S, Filled(command.extent, command.tier))
            elif isinstance(command, Evict):
                self.later(0.0, Evicted(command.extent, command.tier))
            elif isinstance(command, Grant):
                self._wants.pop(command.reader)()
                if command.stay == "once":
                    self.send(Released(command.reader, command.extent))
                else:
                    self._held[command.reader] = command.extent
            elif isinstance(command, Refuse):
                again = Demanded(command.reader, 0, command.extent, job=command.reader)
                self.later(0.02, again)
        if self.node.next_deadline() <= self.clock.now and not self._ticks:
            self._ticks = True
            self.clock.after(0.0, self._tick)

    def later(self, delay_s: float, event: Event) -> None:
        self.clock.after(delay_s, lambda: self.send(event))

    def _tick(self) -> None:
        self._ticks = False
        self.send(Tick())

    def plans(self, count: int, first: int = 0) -> None:
        """Begin that many plans of Bob."""
        for number in range(first, first + count):
            self.plan(2 + number, self.order(number), self.bob)

    def order(self, number: int) -> list[ExtentId]:
        return random.Random(number).sample(self.data[1], len(self.data[1]))

    def plan(self, number: int, order: list[ExtentId], user: int) -> None:
        rows = tuple((extent, step, step) for step, extent in enumerate(order))
        self.send(Planned(number, number, rows, user=user))

    def read(self, number: int, order: list[ExtentId], step_s: float, step: int = 0) -> None:
        """Read one extent after another; a step begins `step_s` after the previous one was served."""

        def granted() -> None:
            self.clock.after(step_s, done)

        def done() -> None:
            if (extent := self._held.pop(number, None)) is not None:
                self.send(Released(ReaderId(number), extent))
            self.send(Passed(number, step + 1))
            if step + 1 < len(order):
                self.read(number, order, step_s, step + 1)

        self._wants[number] = granted
        self.send(Demanded(ReaderId(number), step, order[step], job=number))

    def streamed(self) -> Counter[str]:
        """Read all of Alice's dataset; how many extents were fetched ahead, and how many she waited for."""
        self.plan(1, self.data[0], self.alice)
        self.read(1, self.data[0], STEP_S)
        while self.node.plans.plans[1].passed < len(self.data[0]):
            assert self.clock.step()
        found = self.node.counters(DatasetId("0"))
        check(self.node)
        return Counter(hits=found.hits, ahead=found.ahead, misses=found.misses)

    def wait(self, until_s: float) -> None:
        """Let the others go on for that long."""
        self.later(until_s - self.clock.now, Tick())
        while self.clock.now < until_s:
            assert self.clock.step()


@pytest.mark.parametrize(("count", "least"), [(8, 290), (40, 190), (60, 190), (100, 190)])
def test_idle_plans_of_one_user_leave_another_its_look_ahead(count: int, least: int) -> None:
    users = Users()
    users.plans(count)
    users.wait(60.0)
    assert users.streamed()["ahead"] >= least


@pytest.mark.parametrize("count", [8, 60])
def test_moving_plans_of_one_user_leave_another_its_look_ahead(count: int) -> None:
    users = Users()
    users.plans(count)
    for number in range(count):
        users.read(2 + number, users.order(number), OTHERS_STEP_S)
    users.wait(5.0)
    assert users.streamed()["ahead"] >= 220


def test_plans_of_two_users_have_windows_of_their_own_though_they_begin_alike() -> None:
    users = Users()
    users.plan(2, users.data[1], ALICE)
    users.plan(3, users.data[1], ALICE)
    users.plan(4, users.data[1], BOB)
    plans = users.node.plans.plans
    assert plans[2].window is plans[3].window is not plans[4].window
