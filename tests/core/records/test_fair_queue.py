"""The fair queue: a scan does not delay another job beyond its share of the fills."""

from __future__ import annotations

from collections import Counter, defaultdict
from functools import partial
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.commands import Evict, Grant, Refuse, StartFill
from cachesvc.core.events import DatasetDeclared, Demanded, Event, Evicted, Filled, Prefetched, Released
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId
from cachesvc.core.node.node import Node
from cachesvc.core.records.fair_queue import FairQueue
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.simulate.measure import Clock
from cachesvc.simulate.simulated_node import SimulatedSource, SourceSpec
from tests.support.core.instant import carry_out
from tests.support.core.invariants import check

SIZE = 10


@given(st.lists(st.integers(0, 4) | st.sampled_from(["serve", "drop"]), max_size=60))
def test_owners_take_turns_and_each_is_served_in_its_own_order(moves: list[int | str]) -> None:
    """Run operations: a number appends for that owner; otherwise the first item is served or dropped."""
    turns: FairQueue[tuple[int, int]] = FairQueue()
    asked, done, passed_over = Counter[int](), Counter[int](), defaultdict[int, Counter[int]](Counter)
    for move in moves:
        if isinstance(move, int):
            turns.append(move, (move, asked[move]))
            asked[move] += 1
            continue
        if not len(turns):
            continue
        owner, (_, number) = turns.first
        assert turns.first == (owner, (owner, number))
        turns.served() if move == "serve" else turns.drop()
        assert number == done[owner]
        done[owner] += 1
        if move == "drop":
            if asked[owner] == done[owner]:  # an owner that asks again later joins behind the others
                passed_over.pop(owner, None)
            continue
        passed_over.pop(owner, None)
        for other in asked:
            if asked[other] > done[other] and other != owner:
                passed_over[other][owner] += 1
                assert passed_over[other][owner] <= 1, "served twice while another waited"
    assert len(turns) == sum(asked.values()) - sum(done.values()) == len(list(turns))


def fills_in_order(node: Node, start: list[Event]) -> list[int]:
    """The job of each fill (the first byte of its extent), as every fill is done at once."""
    return [each.extent[0] for each in carry_out(node, *start) if isinstance(each, StartFill)]


def jobs(counts: list[int]) -> list[tuple[tuple[ExtentId, int], ...]]:
    return [
        tuple((ExtentId(bytes([j, k // 256, k % 256]) * 5), SIZE) for k in range(n))
        for j, n in enumerate(counts)
    ]


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 3),
    st.lists(st.integers(1, 8), min_size=1, max_size=3),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
    st.integers(1, 5),
)
def test_a_scan_of_three_hundred_demands_delays_other_jobs_by_their_share(
    slots: int, small: list[int], dataset_of: list[int], readers: int
) -> None:
    """The result does not depend on the datasets of the jobs or on the readers of the scan."""
    extents = jobs([300, *small])
    node = Node([TierSpec(RAM, SIZE * 1000)], NodeSettings(max_fills=slots))
    start: list[Event] = []
    for name in set(dataset_of[: len(extents)]):
        owned = [each for j, each in enumerate(extents) if dataset_of[j] == name]
        start.append(DatasetDeclared(name, DatasetId(str(name)), tuple(e for each in owned for e in each)))
    for j, each in enumerate(extents):
        start += [
            Demanded(ReaderId(100 * j + k % readers), k, extent, job=1000 + j)
            for k, (extent, _) in enumerate(each)
        ]
    order = fills_in_order(node, start)
    assert Counter(order) == Counter({j: len(each) for j, each in enumerate(extents)})
    for job, count in enumerate(small, start=1):
        last = max(at for at, who in enumerate(order) if who == job)
        assert last < slots + 1 + (count + 1) * len(extents), order[:40]


def test_readers_that_name_no_job_are_jobs_of_their_own() -> None:
    (extents,) = jobs([40])
    node = Node([TierSpec(RAM, SIZE * 100)], NodeSettings(max_fills=1))
    start: list[Event] = [DatasetDeclared(1, DatasetId("d"), extents)]
    start += [Demanded(ReaderId(1), k, extent) for k, (extent, _) in enumerate(extents[:39])]
    start += [Demanded(ReaderId(2), 0, extents[39][0])]
    started = [c for event in start for c in node.handle(event, 0.0) if isinstance(c, StartFill)]
    assert [c.extent for c in started] == [extents[0][0]]
    node.handle(Filled(extents[0][0], RAM), 0.0)
    assert node.copies.find(extents[39][0], node.policy.tiers[RAM]) or node.copies.find(
        extents[1][0], node.policy.tiers[RAM]
    )
    node.handle(Filled(extents[1][0], RAM), 0.0)
    assert node.copies.find(extents[39][0], node.policy.tiers[RAM])


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 3), st.integers(1, 20), st.randoms(use_true_random=False))
def test_an_extent_that_two_jobs_wait_for_is_filled_once_when_the_first_is_served(
    slots: int, count: int, chance: Random
) -> None:
    (extents,) = jobs([200])
    node = Node([TierSpec(RAM, SIZE * 300)], NodeSettings(max_fills=slots))
    shared = chance.sample(range(100, 200), count)
    start: list[Event] = [DatasetDeclared(1, DatasetId("d"), extents)]
    start += [Demanded(ReaderId(1), k, extent, job=1) for k, (extent, _) in enumerate(extents)]
    start += [Demanded(ReaderId(2), k, extents[k][0], job=2) for k in shared]
    commands = carry_out(node, *start)
    filled = [each.extent for each in commands if isinstance(each, StartFill)]
    assert sorted(filled) == sorted(extent for extent, _ in extents), "each once"
    assert Counter(each.reader for each in commands if isinstance(each, Grant)) == {1: len(extents), 2: count}
    last = max(at for at, extent in enumerate(filled) if extent in {extents[k][0] for k in shared})
    assert last < slots + 1 + 2 * (count + 1)


def shares(jobs_of: dict[int, tuple[int, int]], until: int) -> dict[int, int]:
    """The extents that each job waited for and got, under a virtual clock. `jobs_of`: job -> (dataset, readers). Each
    reader reads its dataset in an order of its own, eight extents at once, and holds none."""
    node = Node([TierSpec(RAM, SIZE * 120)], NodeSettings(max_fills=4, lookahead_bytes=SIZE * 60))
    clock, source = Clock(), SimulatedSource(SourceSpec(), seed=1)
    catalogs = {d: each for d, each in enumerate(jobs([4000] * (1 + max(d for d, _ in jobs_of.values()))))}
    job_of, order, asked_at = dict[int, int](), dict[int, list[ExtentId]](), dict[tuple[int, int], float]()
    got: Counter[int] = Counter()

    def handle(event: Event) -> None:
        for command in node.handle(event, clock.now):
            if isinstance(command, StartFill):
                delay_s, _ = source.fetch(SIZE << 20, clock.now)
                clock.after(delay_s, partial(handle, Filled(command.extent, command.tier)))
            elif isinstance(command, Evict):
                clock.after(0, partial(handle, Evicted(command.extent, command.tier)))
            elif isinstance(command, Grant):
                got[job_of[command.reader]] += asked_at[command.reader, command.request] < clock.now
                clock.after(0, partial(next_of, command.reader, command.extent))
            elif isinstance(command, Refuse):
                clock.after(0.1, partial(ask, command.reader, command.extent))

    def next_of(reader: int, extent: ExtentId) -> None:
        handle(Released(ReaderId(reader), extent))
        ask(reader, order[reader].pop())

    def ask(reader: int, extent: ExtentId) -> None:
        number = len(asked_at)
        asked_at[reader, number] = clock.now
        handle(Demanded(ReaderId(reader), number, extent, job=job_of[reader]))

    for number, extents in catalogs.items():
        handle(DatasetDeclared(number + 1, DatasetId(str(number)), extents))
    for job, (dataset, readers) in jobs_of.items():
        for k in range(readers):
            reader = 100 * job + k
            job_of[reader] = job
            shuffled = [extent for extent, _ in catalogs[dataset]]
            Random(reader).shuffle(shuffled)
            order[reader] = shuffled
            for _ in range(8):
                ask(reader, shuffled.pop())
    while sum(got.values()) < until:
        clock.step()
    check(node)
    return dict(got)


@pytest.mark.parametrize(
    "jobs_of",
    [
        {1: (0, 1), 2: (0, 1), 3: (1, 1)},  # two jobs on one dataset, one on another
        {1: (0, 6), 2: (0, 1), 3: (1, 1)},  # one of them with six times as many readers
        {1: (0, 6), 2: (0, 1)},
    ],
)
def test_each_job_gets_its_share_of_the_source(jobs_of: dict[int, tuple[int, int]]) -> None:
    got = shares(jobs_of, 1500)
    fair = sum(got.values()) / len(jobs_of)
    assert all(abs(each - fair) <= 0.1 * fair for each in got.values()), got


def test_prefetches_take_turns() -> None:
    extents = jobs([200, 20])
    node = Node([TierSpec(RAM, SIZE * 1000)], NodeSettings(max_fills=2))
    start: list[Event] = [DatasetDeclared(j, DatasetId(str(j)), each) for j, each in enumerate(extents)]
    start += [Prefetched(j, DatasetId(str(j))) for j in range(2)]
    order = fills_in_order(node, start)
    assert max(at for at, who in enumerate(order) if who == 1) < 2 * 20 + 4
