"""A node says what each reader holds, what it waits for, and how far it is in its plan."""

from __future__ import annotations

from cachesvc.core.commands import Grant
from cachesvc.core.errors import SourceUnavailable
from cachesvc.core.events import Demanded, Filled, FillFailed, NotGranted, Passed, Planned, Released
from cachesvc.core.model import RAM
from cachesvc.core.node.status import ReaderStatus
from tests.support.core.names import ONE, SIZE, TWO, A, B
from tests.support.core.node import declare, node_of, read, status, tell


def test_a_reader_that_asked_for_nothing_holds_and_waits_for_nothing() -> None:
    assert node_of(ram=1).reader(ONE) == ReaderStatus()


def test_waits_are_told_apart_by_what_is_missing() -> None:
    node = node_of(ram=2, max_fills=1, fill_bytes=1)
    tell(node, declare(A, B))
    node.handle(Demanded(ONE, 1, A), 3.0)
    node.handle(Demanded(TWO, 2, B), 4.0)
    assert node.reader(ONE) == ReaderStatus(filling=(A,), waiting_since=3.0)
    assert node.reader(TWO) == ReaderStatus(queued=(B,), waiting_since=4.0)
    node.handle(FillFailed(A, RAM, SourceUnavailable.code, "down", retry=True), 5.0)
    assert node.reader(ONE) == ReaderStatus(retried=(A,), waiting_since=3.0)
    assert node.reader(TWO) == ReaderStatus(filling=(B,), waiting_since=4.0)


def test_a_wait_begins_anew_after_its_answer() -> None:
    node = node_of(ram=4)
    tell(node, declare(A, B))
    node.handle(Demanded(ONE, 1, A), 3.0)
    node.handle(Filled(A, RAM), 4.0)
    assert node.reader(ONE) == ReaderStatus(leased_extents=1)
    node.handle(Demanded(ONE, 2, B), 9.0)
    assert node.reader(ONE) == ReaderStatus(leased_extents=1, filling=(B,), waiting_since=9.0)
    node.handle(Released(ONE, A), 9.5)
    assert node.reader(ONE).leased_extents == 0


def test_a_reader_tells_how_far_it_is_in_its_plan() -> None:
    node = node_of(ram=4)
    tell(node, declare(A, B), Planned(ONE, ONE, ((A, 0, 3), (B, 2, 9))))
    assert (node.reader(ONE).step, node.reader(ONE).steps) == (0, 10)
    tell(node, Passed(ONE, 4))
    assert (node.reader(ONE).step, node.reader(ONE).steps) == (4, 10)
    tell(node, Passed(ONE, 1 << 40))
    assert node.reader(ONE).step == 10


def test_granted_bytes_count_each_grant_that_is_handed_over() -> None:
    node = node_of(ram=1)
    read(node, A)
    (again,) = tell(node, Demanded(TWO, 5, A))
    assert isinstance(again, Grant)
    assert status(node).tiers[0].granted_bytes == 2 * SIZE
    tell(node, NotGranted(again))
    assert status(node).tiers[0].granted_bytes == SIZE
