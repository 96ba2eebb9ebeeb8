"""A node keeps what local plans read, whoever owns it, and nothing else of the dataset."""

from __future__ import annotations

from dataclasses import replace

from cachesvc.core.commands import StartFill
from cachesvc.core.events import JobEnded, PeerWants, Planned, ViewChanged
from cachesvc.core.model import RAM, ExtentId
from cachesvc.core.node.node import Node
from cachesvc.core.placement.view import Member, View
from tests.support.core.instant import carry_out
from tests.support.core.names import SIZE
from tests.support.core.node import declare, node_of, plan, read, tell

EVERY = tuple(ExtentId(bytes([at]) * 16) for at in range(8))
MINE, THEIRS = EVERY[:4], EVERY[4:]


def _member() -> Node:
    """One of two members, with room for half of the data."""
    node = node_of(ram=4, lookahead_bytes=None)
    members = (Member("one", 4 * SIZE), Member("two", 4 * SIZE))
    tell(node, ViewChanged(View("one", members)), declare(*EVERY))
    return node


def local(*extents: ExtentId) -> Planned:
    return replace(plan(*extents), local=True)


def test_all_that_a_local_plan_reads_is_kept_in_room_for_no_more() -> None:
    node = _member()
    assert node.policy.reserve.streams
    carry_out(node, local(*MINE))
    assert not node.policy.reserve.streams
    read(node, *MINE)
    assert node.resident_in(RAM) == set(MINE)
    for _ in range(2):
        assert tell(node, local(*reversed(MINE))) == []
        assert read(node, *MINE) == ["kept"] * 4
    assert node.counters(declare(*EVERY).dataset).bound == 1.0


def test_nothing_else_is_fetched_for_other_nodes_or_kept() -> None:
    node = _member()
    read(node, *THEIRS)
    carry_out(node, local(*MINE))
    assert not any(entry.kept for entry in node.copies.entries.values() if entry.id in THEIRS)
    for extent in THEIRS:
        assert not any(isinstance(each, StartFill) for each in tell(node, PeerWants(extent)))
    read(node, *MINE)
    assert node.resident_in(RAM) == set(MINE)


def test_a_job_that_starts_again_finds_what_the_last_one_kept() -> None:
    node = _member()
    carry_out(node, local(*MINE))
    read(node, *MINE)
    tell(node, JobEnded(1), declare(*EVERY, job=2))
    assert tell(node, replace(local(*MINE), job=2)) == []
    assert node.resident_in(RAM) == set(MINE)


def test_other_orders_of_the_job_do_not_end_what_is_kept() -> None:
    node = _member()
    carry_out(node, local(*MINE))
    read(node, *MINE)
    tell(node, declare(*EVERY, job=3))
    carry_out(node, plan(*EVERY, number=3, job=3))
    read(node, *THEIRS)
    assert set(MINE) <= node.resident_in(RAM)
    tell(node, JobEnded(1))
    assert node.policy.reserve.streams, "the other job may read all of it"


def test_what_an_epoch_drops_is_kept_too() -> None:
    node = _member()
    carry_out(node, replace(local(*MINE[:3]), following=MINE))
    read(node, MINE[3], *THEIRS)
    carry_out(node, replace(local(*MINE[1:]), following=MINE))
    assert set(MINE) <= node.resident_in(RAM)
