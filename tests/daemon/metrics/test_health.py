"""Probes: alive while the event loop answers, ready once this node can serve its own readers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from cachesvc.daemon.metrics.health import FIRST_LIST_S, Health
from tests.support.clock import Clock


class Loop:
    """An event loop that runs posted work at once, or never."""

    def __init__(self) -> None:
        self.ended = self.hangs = False

    def post(self, work: Callable[[], None]) -> None:
        if not self.hangs:
            work()


def test_a_loop_that_hangs_is_not_alive_and_not_ready() -> None:
    loop = Loop()
    health = Health(loop, None, answer_s=0.0)
    assert (health.alive(), health.ready()) == ("", "")
    loop.hangs = True
    assert health.alive() == health.ready() == "the event loop has not answered for 0 s"


def test_a_node_waits_for_its_first_list_of_members_and_then_goes_on_without_one() -> None:
    members, clock = SimpleNamespace(knows_members=False), Clock()
    health = Health(Loop(), members, clock)
    assert health.ready() == "waiting for the first list of members"
    assert health.alive() == "", "a missing list is no reason for a restart"
    members.knows_members = True
    assert health.ready() == ""
    members.knows_members = False
    clock.now += FIRST_LIST_S
    assert health.ready() == ""


def test_a_daemon_that_ends_takes_no_new_readers() -> None:
    loop = Loop()
    health = Health(loop, None)
    health.leave()
    assert (health.ready(), health.alive()) == ("this daemon is stopping", "")
    loop.ended = True
    assert Health(loop, None).ready() == "this daemon is stopping"
