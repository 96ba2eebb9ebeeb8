"""The directory sends each node somewhere, never in a circle, and names the source once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachesvc.core.limits import FILL_LEASE_S
from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE, Answer, ExtentDirectory

A, B = (ExtentId(bytes([number]) * 16) for number in (1, 2))
NODES = ("n0", "n1", "n2", "n3", "n4")
nodes = st.sampled_from(NODES)
extents = st.sampled_from([A, B])
some_nodes = st.frozensets(nodes, max_size=3)


class AgainstAModel(RuleBasedStateMachine):
    """The model keeps what is true of each pair of node and extent: it holds the extent, or it was last sent somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = ExtentDirectory()
        self.now = 0.0
        self.holds: set[tuple[str, ExtentId]] = set()
        self.leases: dict[tuple[str, ExtentId], tuple[int, float]] = {}
        self.reads: dict[tuple[str, ExtentId], str] = {}
        """Where each node that has not finished reads, as it was told last, also after its lease ended."""

    @rule(seconds=st.sampled_from([0.5, FILL_LEASE_S / 2, FILL_LEASE_S + 1]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds

    @rule(asker=nodes, extent=extents, failed=some_nodes, away=some_nodes)
    def a_node_asks(self, asker: str, extent: ExtentId, failed: frozenset[str], away: frozenset[str]) -> None:
        self._expire(extent)
        for node in failed:
            self.leases.pop((node, extent), None)
        answer = self.directory.lookup(asker, extent, self.now, failed, away)
        assert answer.node != asker
        assert answer.node not in failed | away
        self.holds.discard((asker, extent))
        self.leases.pop((asker, extent), None)
        self._check_answer(asker, extent, failed | away, answer)
        self.leases[asker, extent] = answer.generation, self.now
        self.reads[asker, extent] = answer.node
        self._check_no_circle(asker, extent)

    def _check_answer(self, asker: str, extent: ExtentId, left_out: frozenset[str], answer: Answer) -> None:
        known = {node for node, each in (*self.holds, *self.leases) if each == extent}
        usable = {
            node for node in known - left_out if not self._reads_from(node, extent, asker) and node != asker
        }
        if not usable:
            assert answer.node == SOURCE, "no other node can give it"
            return
        assert answer.node in usable, "a node that cannot give it, or the source without need"
        assert answer.filling == ((answer.node, extent) not in self.holds)
        load = Counter(self.reads[node, each] for node, each in self.leases if each == extent)
        assert load[answer.node] == min(load[node] for node in usable), "others are less busy"

    def _reads_from(self, node: str, extent: ExtentId, other: str) -> bool:
        seen = set[str]()
        while (node, extent) in self.leases and node not in seen:
            seen.add(node)
            node = self.reads[node, extent]
            if node == other:
                return True
        return False

    def _check_no_circle(self, asker: str, extent: ExtentId) -> None:
        assert not self._reads_from(asker, extent, asker), "a fill that waits for itself"

    @rule(node=nodes, extent=extents)
    def a_node_holds(self, node: str, extent: ExtentId) -> None:
        self.directory.filled(node, [extent])
        self.holds.add((node, extent))
        self.leases.pop((node, extent), None)

    @rule(node=nodes, generation_off=st.sampled_from([0, 0, -1]))
    def a_node_renews(self, node: str, generation_off: int) -> None:
        for extent in (A, B):
            lease = self.leases.get((node, extent))
            if lease is not None:
                ended = self.directory.renew(node, [(extent, lease[0] + generation_off)], self.now)
                assert ended == ([extent] if generation_off else [])
                if not generation_off:
                    self.leases[node, extent] = lease[0], self.now

    @rule(node=nodes, both=st.booleans())
    def a_node_drops(self, node: str, both: bool) -> None:
        gone = (A, B) if both else (A,)
        self.directory.dropped(node, gone)
        self._lose(node, gone)

    @rule(node=nodes)
    def a_node_leaves(self, node: str) -> None:
        self.directory.forget(node)
        self._lose(node, (A, B))

    @rule(node=nodes)
    def a_node_announces_anew(self, node: str) -> None:
        self.directory.announced_anew(node, [B], self.now)
        self.holds -= {(node, A), (node, B)}
        self.leases.pop((node, B), None)
        _, at = self.leases.get((node, A), (0, self.now))
        if self.now - at > FILL_LEASE_S:
            del self.leases[node, A]
        self.holds.add((node, B))

    def _lose(self, node: str, gone: tuple[ExtentId, ...]) -> None:
        for extent in gone:
            self.holds.discard((node, extent))
            self.leases.pop((node, extent), None)

    def _expire(self, extent: ExtentId) -> None:
        for node in NODES:
            lease = self.leases.get((node, extent))
            if lease is not None and self.now - lease[1] > FILL_LEASE_S:
                del self.leases[node, extent]

    @invariant()
    def holders_are_known(self) -> None:
        for extent in (A, B):
            holders = self.directory.holders(extent)
            assert {(node, extent) for node in holders} == {each for each in self.holds if each[1] == extent}
            alive = any(
                self.now - at <= FILL_LEASE_S for (_, each), (_, at) in self.leases.items() if each == extent
            )
            assert self.directory.wanted(extent, self.now) == (bool(holders) or alive)
        noted = {extent for _, extent in (*self.holds, *self.leases)}
        assert set(self.directory.extents()) == noted
        assert len(self.directory) == len(noted)
        assert self.directory.nodes() == {node for node, _ in (*self.holds, *self.leases)}


TestAgainstAModel = AgainstAModel.TestCase
TestAgainstAModel.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("count", [2, 8, 64, 200])
def test_nodes_that_ask_at_once_form_a_chain_and_one_is_sent_to_the_source(count: int) -> None:
    directory = ExtentDirectory()
    told = [directory.lookup(f"n{at}", A, 0.0).node for at in range(count)]
    assert told == [SOURCE, *(f"n{at}" for at in range(count - 1))]


@given(st.permutations(range(12)), st.data())
def test_a_chain_survives_any_nodes_that_die_with_one_new_fetch_at_most(
    order: list[int], data: st.DataObject
) -> None:
    """Each node that reads from a dead one asks again and says so, in any order."""
    directory = ExtentDirectory()
    reads = {f"n{at}": directory.lookup(f"n{at}", A, 0.0).node for at in order}
    dead = data.draw(st.sets(st.sampled_from(sorted(reads)), max_size=6))
    asking = [node for node in reads if node not in dead and reads[node] in dead]
    sources = 0
    for node in data.draw(st.permutations(asking)):
        failed = {reads[node]}
        reads[node] = directory.lookup(node, A, 1.0, failed).node
        while reads[node] in dead:
            failed.add(reads[node])
            reads[node] = directory.lookup(node, A, 1.0, failed).node
        sources += reads[node] == SOURCE
    assert sources <= 1
    for node in set(reads) - dead:
        seen = set[str]()
        while node != SOURCE:
            assert node not in seen | dead
            seen.add(node)
            node = reads[node]


def test_a_lease_that_is_not_renewed_is_given_to_one_other_node() -> None:
    directory = ExtentDirectory()
    first = directory.lookup("n0", A, 0.0)
    assert directory.renew("n0", [(A, first.generation)], 5.0) == []
    assert directory.lookup("n1", A, FILL_LEASE_S + 4).node == "n0"
    late = 3 * FILL_LEASE_S
    assert not directory.wanted(A, late)
    told = [directory.lookup(f"n{at}", A, late).node for at in range(2, 6)]
    assert told == [SOURCE, "n2", "n3", "n4"]
    assert directory.renew("n0", [(A, first.generation)], late) == [A], "it is told that its lease has ended"
    directory.filled("n0", [A])
    assert directory.lookup("n6", A, late) == Answer("n0", False, 8), "what it fetched all the same is used"


def test_nodes_that_ask_one_after_another_are_spread_over_the_holders() -> None:
    directory = ExtentDirectory()
    for holder in ("a", "b", "c"):
        directory.filled(holder, [A])
    told = Counter[str]()
    for at in range(30):
        told[directory.lookup(f"n{at}", A, 0.0).node] += 1
        directory.dropped(f"n{at}", [A])
    assert set(told.values()) == {10}


@pytest.mark.parametrize("order", ["the head first", "the tail first"])
def test_of_a_chain_behind_a_fill_that_stands_still_one_reads_the_source(order: str) -> None:
    directory = ExtentDirectory()
    reads = {node: directory.lookup(node, A, 0.0).node for node in NODES}
    assert list(reads.values()) == [SOURCE, *NODES[:-1]]
    behind = list(NODES[1:])
    for node in behind if order == "the head first" else reversed(behind):
        reads[node] = directory.lookup(node, A, 5.0, late=[reads[node]]).node
    answers = [reads[node] for node in behind]
    assert answers.count(SOURCE) == 1
    for node in behind:
        seen = set[str]()
        while node != SOURCE:
            assert node != NODES[0]
            assert node not in seen
            seen.add(node)
            node = reads[node]
    assert directory.lookup(NODES[0], A, 6.0, late=[SOURCE]).node in behind


def test_a_late_fill_is_named_again_once_it_makes_progress() -> None:
    directory = ExtentDirectory()
    lease = directory.lookup("n0", A, 0.0)
    directory.lookup("n1", A, 0.0)
    assert directory.lookup("n1", A, 5.0, late=["n0"]).node == SOURCE
    directory.dropped("n1", [A])
    assert not directory.wanted(A, 5.0)
    assert directory.lookup("n2", A, 5.0).node == SOURCE
    directory.dropped("n2", [A])
    directory.renew("n0", [(A, lease.generation)], 6.0)
    assert directory.lookup("n2", A, 6.0).node == "n0"


def test_a_node_that_holds_an_extent_and_is_slow_for_one_is_named_to_others() -> None:
    directory = ExtentDirectory()
    directory.filled("n0", [A])
    assert directory.lookup("n1", A, 0.0, late=["n0"]).node == SOURCE
    directory.dropped("n1", [A])
    assert directory.lookup("n2", A, 0.0).node == "n0"
