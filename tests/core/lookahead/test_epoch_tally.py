"""Plans that count as one epoch of a dataset."""

from __future__ import annotations

from cachesvc.core.events import JobEnded, Passed, Pinned, PlanEnded, Planned
from cachesvc.core.lookahead.plans import MAX_BROKEN
from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.core.node.node import Node
from tests.support.core.instant import carry_out
from tests.support.core.node import A, B, C, D, declare, node_of, read, tell

DATASET = DatasetId("d")
DONE = 1 << 40


def warm(*extents: ExtentId) -> Node:
    """A node that has all of a dataset, which an operator pinned."""
    node = node_of(ram=8)
    tell(node, declare(*extents, job=100), Pinned(DATASET))
    read(node, *extents)
    return node


def plan(*extents: ExtentId, number: int, launch: int = 0) -> Planned:
    rows = tuple((extent, step, step) for step, extent in enumerate(extents))
    return Planned(number, number, rows, launch=launch)


def begin(node: Node, *extents: ExtentId, number: int, launch: int = 0, now: float = 1.0) -> None:
    tell(node, declare(A, B, C, D, job=number), plan(*extents, number=number, launch=launch), now=now)


def end(node: Node, number: int) -> None:
    """Close its connection."""
    tell(node, PlanEnded(number), JobEnded(number), now=2.0)


def epochs_of(node: Node) -> list[tuple[int, int, int]]:
    """The number, touched extents and hits of each epoch."""
    return [(each.number, each.touched, each.hits) for each in node.counters(DATASET).epochs]


def test_jobs_one_after_the_other_have_epochs_of_their_own() -> None:
    node = warm(A, B, C, D)
    for number in (1, 2, 3):  # of one script, say, so that nothing else tells them apart
        begin(node, A, B, C, D, number=number, launch=7)
        tell(node, Passed(number, DONE), now=1.5)
        end(node, number)
    assert epochs_of(node) == [(0, 4, 4), (1, 4, 4), (2, 4, 4)]


def test_ranks_of_a_job_share_an_epoch_whenever_each_begins_and_ends() -> None:
    node = warm(A, B, C, D)
    begin(node, A, B, number=1, launch=7)
    tell(node, Passed(1, 1), now=1.1)
    begin(node, C, D, number=2, launch=7)
    tell(node, Passed(2, DONE), now=1.2)
    end(node, 2)
    tell(node, Passed(1, DONE), now=1.3)
    assert epochs_of(node) == [(0, 4, 4)]
    begin(node, D, C, number=1, launch=7)
    assert [number for number, *_ in epochs_of(node)] == [0, 1], "the same connection again"


def test_an_extent_that_one_rank_fetched_before_another_began_is_no_hit_of_that() -> None:
    node = node_of(ram=8)
    tell(node, declare(A, B, C, D, job=100), Pinned(DATASET))
    carry_out(node, declare(A, B, C, D, job=1), plan(A, B, C, D, number=1, launch=7), now=1.0)
    begin(node, A, B, C, D, number=2, launch=7, now=1.2)
    tell(node, Passed(1, DONE), Passed(2, DONE), now=1.5)
    assert epochs_of(node) == [(0, 8, 0)], "each by both of them"


def test_jobs_side_by_side_have_epochs_of_their_own() -> None:
    node = warm(A, B, C, D)
    for _ in range(2):
        begin(node, A, B, C, D, number=1, launch=7)
        begin(node, D, C, number=2, launch=8)
        tell(node, Passed(1, DONE), Passed(2, DONE), now=1.5)
    assert epochs_of(node) == [(0, 4, 4), (1, 2, 2), (2, 4, 4), (3, 2, 2)]


def test_a_reader_that_connects_anew_in_mid_epoch_goes_on_in_it() -> None:
    node = warm(A, B, C, D)
    begin(node, A, B, C, D, number=1, launch=7)
    tell(node, Passed(1, 2), now=1.1)
    end(node, 1)
    begin(node, A, B, C, D, number=2, launch=7)
    tell(node, Passed(2, 3), now=1.2)
    end(node, 2)
    begin(node, A, B, C, D, number=3, launch=7)
    tell(node, Passed(3, DONE), now=1.3)
    assert epochs_of(node) == [(0, 4, 4)], "each extent once"
    end(node, 3)
    begin(node, A, B, C, D, number=4, launch=7)
    assert len(epochs_of(node)) == 2, "that epoch is over"


def test_a_rank_that_connects_anew_beside_others_counts_nothing_twice() -> None:
    node = warm(A, B, C, D)
    begin(node, A, B, number=1, launch=7)
    begin(node, C, D, number=2, launch=7)
    tell(node, Passed(1, 1), now=1.1)
    end(node, 1)
    begin(node, A, B, number=3, launch=7)
    tell(node, Passed(3, DONE), Passed(2, DONE), now=1.2)
    assert epochs_of(node) == [(0, 4, 4)]


def test_another_order_after_one_that_was_broken_off_is_another_epoch() -> None:
    node = warm(A, B, C, D)
    begin(node, A, B, C, D, number=1, launch=7)
    tell(node, Passed(1, 2), now=1.1)
    end(node, 1)
    begin(node, D, C, B, A, number=2, launch=7)
    tell(node, Passed(2, DONE), now=1.2)
    assert epochs_of(node) == [(0, 2, 2), (1, 4, 4)]


def test_plans_that_are_broken_off_over_and_over_take_no_more_memory() -> None:
    node = warm(A, B, C, D)
    begin(node, A, B, C, D, number=1, launch=7)
    for number in range(2, MAX_BROKEN + 50):
        node.handle(Planned(number, 1, ((A, 0, number), (B, 1, number)), launch=7), 1.0)
        node.handle(PlanEnded(number), 1.0)
    (epoch,) = node.policy.shares.datasets[DATASET].epochs
    assert len(epoch.broken) == MAX_BROKEN
    assert epoch.running == {1}
