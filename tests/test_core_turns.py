"""Nobody's scan stalls another job beyond its share of the fills."""

from __future__ import annotations

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.events import DatasetDeclared, Demanded, Event, Filled, Prefetched, StartFill
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.node import Node
from cachesvc.core.policy import Settings, TierSpec
from cachesvc.core.turns import Turns

SIZE = 10


@given(st.lists(st.integers(0, 4) | st.none(), max_size=60))
def test_owners_take_turns_and_each_is_served_in_its_own_order(moves: list[int | None]) -> None:
    """A number: that owner asks; None: one is served."""
    turns: Turns[tuple[int, int]] = Turns()
    asked, served, passed_over = Counter[int](), Counter[int](), defaultdict[int, Counter[int]](Counter)
    for move in moves:
        if move is not None:
            turns.append(move, (move, asked[move]))
            asked[move] += 1
            continue
        if not len(turns):
            continue
        owner, number = turns.first
        assert turns.first == (owner, number)
        turns.pass_on()
        assert number == served[owner]
        served[owner] += 1
        passed_over.pop(owner, None)
        for other in asked:
            if asked[other] > served[other] and other != owner:
                passed_over[other][owner] += 1
                assert passed_over[other][owner] <= 1, "served twice while another waited"
    assert len(turns) == sum(asked.values()) - sum(served.values()) == len(list(turns))


def fills_in_order(node: Node, start: list[Event]) -> list[int]:
    """Which job each fill was for (the first byte of its extent), as every fill is done at once."""
    order: list[int] = []
    waiting = [command for event in start for command in node.handle(event, 0.0)]
    while waiting:
        command = waiting.pop(0)
        if isinstance(command, StartFill):
            order.append(command.extent[0])
            waiting += node.handle(Filled(command.extent, command.tier), 0.0)
        if len(waiting) % 20 == 0:
            node.check()
    return order


def jobs(counts: list[int]) -> list[tuple[tuple[ExtentId, int], ...]]:
    return [
        tuple((ExtentId(bytes([j, k // 256, k % 256]) * 5), SIZE) for k in range(n))
        for j, n in enumerate(counts)
    ]


@settings(max_examples=15, deadline=None)
@given(st.integers(1, 3), st.lists(st.integers(1, 8), min_size=1, max_size=3))
def test_a_scan_of_three_hundred_demands_delays_others_by_their_share(slots: int, small: list[int]) -> None:
    extents = jobs([300, *small])
    node = Node([TierSpec(RAM, SIZE * 1000)], Settings(max_fills=slots))
    start: list[Event] = [DatasetDeclared(j, DatasetId(str(j)), each) for j, each in enumerate(extents)]
    start += [Demanded(ReaderId(j), k, e) for j, each in enumerate(extents) for k, (e, _) in enumerate(each)]
    order = fills_in_order(node, start)
    assert Counter(order) == Counter({j: len(each) for j, each in enumerate(extents)})
    for job, count in enumerate(small, start=1):
        last = max(at for at, who in enumerate(order) if who == job)
        assert last < slots + 1 + (count + 1) * len(extents), order[:40]


def test_prefetches_take_turns() -> None:
    extents = jobs([200, 20])
    node = Node([TierSpec(RAM, SIZE * 1000)], Settings(max_fills=2))
    start: list[Event] = [DatasetDeclared(j, DatasetId(str(j)), each) for j, each in enumerate(extents)]
    start += [Prefetched(j, DatasetId(str(j))) for j in range(2)]
    order = fills_in_order(node, start)
    assert max(at for at, who in enumerate(order) if who == 1) < 2 * 20 + 4
