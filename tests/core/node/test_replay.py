"""Takeovers at any moment: another core goes on where the first one stopped."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import rule

from cachesvc.config import Rule
from cachesvc.core import commands as cmd
from cachesvc.core import events as ev
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.node.snapshot import best_first, protecting_first, replay
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.daemon.takeover import state as takeover_state
from cachesvc.v1 import takeover_pb2
from tests.support.core.machine import NodeMachine
from tests.support.core.small_node import BUDGETS, DATASETS, NVME, SIZES, picks

HELD = TierName("memory that only its readers have")
A, B, C = (ExtentId(bytes([number]) * 16) for number in range(3))
DATASET = DatasetId("d")
READER = ReaderId(1)
EXTENTS = ((A, 10), (B, 10), (C, 10))


class ChangingHands(NodeMachine):
    """A machine in which another node takes over at times: fills and checks under way are lost, all else goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.granted: list[cmd.Grant] = []

    def obey(self, command: cmd.Command) -> None:
        super().obey(command)
        if isinstance(command, cmd.Grant):
            self.granted.append(command)

    @rule(ram_bytes=st.integers(0, BUDGETS[RAM]), unsent=st.booleans(), pick=picks)
    def another_takes_over(self, ram_bytes: int, unsent: bool, pick: int) -> None:
        old, late = self.node, self.unsent(pick) if unsent else []
        found, room = [], ram_bytes
        for extent, size_bytes in best_first(old, RAM):
            if size_bytes <= room:
                found.append((extent, size_bytes))
                room -= size_bytes
        told = replay(old, late)
        for name, gone in (
            (RAM, self.stored[RAM] - {extent for extent, _ in found}),
            (NVME, self.evicting()),
        ):
            self.stored[name] -= gone
            self.leases = [(r, e, HELD if t == name and e in gone else t) for r, e, t in self.leases]
        self.fills, self.evictions, self.commits, self.checks, self.lost = [], [], [], [], False
        asked = {(e.reader, e.request) for e in told if isinstance(e, ev.Demanded)}
        assert asked == {(reader, request) for request, (reader, _) in self.open.items()}, (
            "every waiter is told"
        )
        specs = [TierSpec(RAM, ram_bytes), TierSpec(NVME, self.budgets[NVME])]
        self.node = Node(
            specs,
            NodeSettings(
                lookahead_bytes=4, max_fills=3, max_attempts=2, scrub_bytes_per_s=200, hold_s=math.inf
            ),
        )
        self.send(ev.Recovered(NVME, {extent: SIZES[extent] for extent in sorted(self.stored[NVME])}))
        self.send(ev.Recovered(RAM, dict(reversed(found))))
        for known, dataset in old.policy.shares.datasets.items():
            for job in sorted(dataset.jobs):
                self.send(ev.DatasetDeclared(job, known, DATASETS[known]))
            if dataset.pinned:
                self.send(ev.Pinned(known))
        for event in protecting_first(self.node, told):
            self.send(event)
        assert {p.number for p in self.node.plans.plans.values()} == set(old.plans.plans)

    def unsent(self, pick: int) -> list[cmd.Grant]:
        """A grant that its reader has not received: in the model, the reader waits again."""
        for grant in self.granted[pick % (len(self.granted) + 1) :]:
            lease = (grant.reader, grant.extent, grant.tier)
            if lease in self.leases:
                self.leases.remove(lease)
                self.open[grant.request] = (grant.reader, grant.extent)
                self.granted.remove(grant)
                return [grant]
        return []

    def evicting(self) -> set[ExtentId]:
        return {evict.extent for evict in self.evictions if evict.tier == NVME}


TestChangingHands = ChangingHands.TestCase
TestChangingHands.settings = settings(
    max_examples=60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def node(ram_bytes: int = 30) -> Node:
    return Node([TierSpec(RAM, ram_bytes)], NodeSettings(lookahead_bytes=30))


def filled(extents: tuple[ExtentId, ...] = (A, B, C)) -> Node:
    """A node that has the dataset's extents, each used once, one after another."""
    found = node()
    found.handle(ev.DatasetDeclared(READER, DATASET, EXTENTS), 0.0)
    for number, extent in enumerate(extents):
        found.handle(ev.Demanded(READER, number, extent), number)
        found.handle(ev.Filled(extent, RAM), number)
        found.handle(ev.Released(READER, extent), number)
    return found


def test_leased_copies_come_first_then_the_most_recently_used() -> None:
    old = filled()
    old.handle(ev.Demanded(READER, 9, A), 9.0)
    assert [extent for extent, _ in best_first(old, RAM)] == [A, C, B]


def test_pinned_copies_come_before_those_that_are_only_kept() -> None:
    old = filled()
    old.handle(ev.DatasetDeclared(2, DatasetId("pinned"), ((A, 10),)), 9.0)
    old.handle(ev.Pinned(DatasetId("pinned")), 9.0)
    assert [extent for extent, _ in best_first(old, RAM)] == [A, C, B]


def test_dormant_extents_are_handed_over_last() -> None:
    old = node()
    old.handle(ev.Recovered(RAM, {A: 10, B: 10, C: 10}), 0.0)
    assert best_first(old, RAM) == [(C, 10), (B, 10), (A, 10)], "what would be evicted first is the last"
    old.handle(ev.DatasetDeclared(READER, DATASET, ((A, 10),)), 1.0)
    assert [extent for extent, _ in best_first(old, RAM)] == [A, C, B]


def test_a_lease_is_handed_over_as_a_lease_and_protects_its_copy() -> None:
    old = filled((A,))
    old.handle(ev.Demanded(READER, 9, A), 9.0)
    new = node()
    new.handle(ev.Recovered(RAM, {A: 10}), 0.0)
    for event in replay(old, ()):
        assert new.handle(event, 1.0) == []
    new.handle(ev.EvictAsked(DATASET, (A,)), 2.0)
    assert new.where(A) == RAM
    new.handle(ev.Released(READER, A), 3.0)
    assert new.handle(ev.EvictAsked(DATASET, (A,)), 4.0) == [cmd.Evict(A, RAM)]


def test_a_lease_of_a_copy_that_does_not_fit_counts_as_held_memory() -> None:
    old = filled((A,))
    old.handle(ev.Demanded(READER, 9, A), 9.0)
    new = node(ram_bytes=15)
    for event in replay(old, ()):
        new.handle(event, 1.0)
    assert new.status().tiers[0].held_bytes == 10
    new.handle(ev.Released(READER, A), 2.0)
    assert new.status().tiers[0].held_bytes == 0


def test_leased_copies_that_fit_a_smaller_budget_are_not_evicted_for_those_that_do_not() -> None:
    old = filled((A, B))
    for number, extent in enumerate((A, B)):
        old.handle(ev.Demanded(READER, 9 + number, extent), 9.0)
    new = node(ram_bytes=15)
    new.handle(ev.Recovered(RAM, {B: 10}), 0.0)
    told = [command for event in protecting_first(new, replay(old, ())) for command in new.handle(event, 1.0)]
    assert told == [cmd.Recall(READER, A, wrong=False)], "it is asked back"
    assert new.readers.readers[READER].leases.keys() == {B}
    assert new.status().tiers[0].held_bytes == 10


def test_a_grant_that_was_not_sent_is_granted_again() -> None:
    old = filled((A,))
    (unsent,) = old.handle(ev.Demanded(READER, 9, A), 9.0)
    assert isinstance(unsent, cmd.Grant)
    new = node()
    new.handle(ev.Recovered(RAM, {A: 10}), 0.0)
    answers = [command for event in replay(old, [unsent]) for command in new.handle(event, 1.0)]
    assert answers == [cmd.Grant(READER, 9, A, RAM, "brief")]
    assert new.readers.readers[READER].leases.keys() == {A}
    assert len(new.readers.readers[READER].leases[A]) == 1


def test_a_grant_whose_reader_and_extent_are_gone_is_not_handed_over() -> None:
    old = Node([TierSpec(NVME, 30)])
    old.handle(ev.Recovered(NVME, {A: 10}), 0.0)
    (unsent,) = old.handle(ev.Demanded(READER, 9, A), 1.0)
    assert isinstance(unsent, cmd.Grant)
    for event in (ev.ReaderGone(READER), ev.EvictAsked(DATASET, (A,)), ev.Evicted(A, NVME)):
        old.handle(event, 2.0)
    assert replay(old, [unsent]) == []


def test_a_plan_goes_on_in_the_middle_and_its_past_counts_in_no_epoch() -> None:
    old = node()
    old.handle(ev.DatasetDeclared(READER, DATASET, EXTENTS), 0.0)
    old.handle(ev.Planned(READER, READER, ((A, 0, 0), (B, 1, 1), (C, 2, 2))), 0.0)
    old.handle(ev.Passed(READER, 2), 1.0)
    new = node()
    new.handle(ev.DatasetDeclared(READER, DATASET, EXTENTS), 0.0)
    (told,) = [event for event in replay(old, ()) if isinstance(event, ev.Planned)]
    assert new.handle(told, 2.0) == [cmd.StartFill(C, RAM)]
    (epoch,) = new.counters(DATASET).epochs
    assert (epoch.touched, epoch.hits) == (0, 0)


def test_waiting_readers_keep_their_job_in_the_queue_and_plans_their_epoch() -> None:
    """The messages of a takeover name a job only in its connection."""
    old, other, job = node(), ReaderId(2), (1001 << 64) + 5
    for reader in (READER, other):
        old.handle(ev.DatasetDeclared(reader, DATASET, EXTENTS), 0.0)
        old.handle(ev.Planned(reader, reader, ((A, 0, 0), (B, 1, 1)), launch=job, user=1000), 0.0)
    old.handle(ev.Demanded(READER, 1, B, job=job), 0.0)
    old.handle(ev.Demanded(other, 2, C, job=job), 0.0)
    told = replay(old, ())
    assert [event.job for event in told if isinstance(event, ev.Demanded)] == [job, job]
    extents = tuple(extent for extent, _ in EXTENTS)
    known = Known(DATASET, extents, (10, 10, 10), {extent: at for at, extent in enumerate(extents)})
    datasets: dict[int, Known] = {READER: known, other: known}
    state = takeover_pb2.TakeoverState()
    takeover_state.write_events(state, told, datasets.get)
    found = list(takeover_state.read_events(state, datasets.get, lambda _: job, lambda _: 1000))
    assert sorted(found, key=repr) == sorted(told, key=repr)


@dataclass
class Known:
    """The dataset, as the grants socket sees it."""

    id: DatasetId
    extent_ids: tuple[ExtentId, ...]
    sizes: tuple[int, ...]
    index_of: dict[ExtentId, int]
    rules: frozenset[Rule] = frozenset()
    catalog_fd: int = -1
