"""Plans that count as one epoch of a dataset."""

from __future__ import annotations

import pytest

from cachesvc.core.events import Event, JobEnded, Passed, Pinned, PlanEnded, Planned
from cachesvc.core.lookahead.plans import MAX_BROKEN
from cachesvc.core.model import ExtentId
from cachesvc.core.node.node import Node
from tests.support.core.instant import carry_out
from tests.support.core.names import DATASET, A, B, C, D
from tests.support.core.node import declare, node_of, read, tell

DONE = 1 << 40


def warm() -> Node:
    """A node that has all of a dataset, which an operator pinned."""
    node = node_of(ram=8)
    tell(node, declare(A, B, C, D, job=100), Pinned(DATASET))
    read(node, A, B, C, D)
    return node


def begins(number: int, *extents: ExtentId, launch: int = 7) -> list[Event]:
    rows = tuple((extent, step, step) for step, extent in enumerate(extents))
    return [declare(A, B, C, D, job=number), Planned(number, number, rows, launch=launch)]


def ends(number: int) -> list[Event]:
    """The events of a connection that is closed."""
    return [PlanEnded(number), JobEnded(number)]


def epochs_of(node: Node) -> list[tuple[int, int, int]]:
    """The number, touched extents and hits of each epoch."""
    return [(each.number, each.touched, each.hits) for each in node.counters(DATASET).epochs]


RANKS: list[Event] = [
    *begins(1, A, B),
    Passed(1, 1),
    *begins(2, C, D),
    Passed(2, DONE),
    *ends(2),
    Passed(1, DONE),
]
ANEW: list[Event] = [
    *(*begins(1, A, B, C, D), Passed(1, 2), *ends(1)),
    *(*begins(2, A, B, C, D), Passed(2, 3), *ends(2)),
    *(*begins(3, A, B, C, D), Passed(3, DONE)),
]
BESIDE = [*begins(1, A, B, C, D), *begins(2, D, C, launch=8), Passed(1, DONE), Passed(2, DONE)]
EPOCHS: dict[str, tuple[list[Event], list[tuple[int, int, int]]]] = {
    "jobs of one script, one after the other": (
        [event for n in (1, 2, 3) for event in (*begins(n, A, B, C, D), Passed(n, DONE), *ends(n))],
        [(0, 4, 4), (1, 4, 4), (2, 4, 4)],
    ),
    "ranks of a job share one, whenever each begins and ends": (RANKS, [(0, 4, 4)]),
    "the same connection begins the next": ([*RANKS, *begins(1, D, C)], [(0, 4, 4), (1, 0, 0)]),
    "jobs side by side have epochs of their own": (BESIDE * 2, [(0, 4, 4), (1, 2, 2), (2, 4, 4), (3, 2, 2)]),
    "a reader that connects anew in mid-epoch goes on": (ANEW, [(0, 4, 4)]),
    "a reader that connects anew after its end": ([*ANEW, *ends(3), *begins(4, A)], [(0, 4, 4), (1, 0, 0)]),
    "a rank that connects anew beside others": (
        [
            *begins(1, A, B),
            *begins(2, C, D),
            Passed(1, 1),
            *ends(1),
            *begins(3, A, B),
            Passed(3, DONE),
            Passed(2, DONE),
        ],
        [(0, 4, 4)],
    ),
    "another order after one that was broken off": (
        [*begins(1, A, B, C, D), Passed(1, 2), *ends(1), *begins(2, D, C, B, A), Passed(2, DONE)],
        [(0, 2, 2), (1, 4, 4)],
    ),
}


@pytest.mark.parametrize("case", EPOCHS)
def test_each_run_over_a_dataset_is_an_epoch_that_counts_each_extent_once(case: str) -> None:
    node, (events, epochs) = warm(), EPOCHS[case]
    tell(node, *events, now=1.0)
    assert epochs_of(node) == epochs


def test_an_extent_that_one_rank_fetched_before_another_began_is_no_hit_of_that() -> None:
    node = node_of(ram=8)
    tell(node, declare(A, B, C, D, job=100), Pinned(DATASET))
    carry_out(node, *begins(1, A, B, C, D), now=1.0)
    tell(node, *begins(2, A, B, C, D), Passed(1, DONE), Passed(2, DONE), now=1.2)
    assert epochs_of(node) == [(0, 8, 0)], "each by both of them"


def test_plans_that_are_broken_off_over_and_over_take_no_more_memory() -> None:
    node = warm()
    tell(node, *begins(1, A, B, C, D))
    for number in range(2, MAX_BROKEN + 50):
        node.handle(Planned(number, 1, ((A, 0, number), (B, 1, number)), launch=7), 1.0)
        node.handle(PlanEnded(number), 1.0)
    (epoch,) = node.policy.shares.datasets[DATASET].epochs
    assert len(epoch.broken) == MAX_BROKEN
    assert epoch.running == {1}
