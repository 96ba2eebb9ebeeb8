"""Members join by an answer, keep their share while they are away, and are known by name alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cachesvc.core.limits import GREET_RETRY_CAP_S, GREET_S
from cachesvc.core.placement.roster import (
    OLDEST_VERSION,
    PROTOCOL_VERSION,
    Endpoint,
    Greeting,
    Roster,
    Row,
)
from cachesvc.core.placement.view import Member

ME = Greeting("me", "instance-me", PROTOCOL_VERSION, 100)
GRACE_S = 600.0
MY_ADDRESS = "10.0.0.1:7070"
A, B, C = "10.0.0.2:7070", "10.0.0.3:7070", "10.0.0.4:7070"


def node(name: str, start: int = 1, weight: int = 100) -> Greeting:
    """A node after its n-th start."""
    return Greeting(name, f"{name}-{start}", PROTOCOL_VERSION, weight)


def roster(*addresses: str) -> Roster:
    """A roster to which these addresses were listed at 0 s."""
    found = Roster(ME, GRACE_S)
    found.listed([Endpoint(address) for address in addresses], 0.0)
    return found


def names(found: Roster) -> list[str]:
    return [member.name for member in found.view().members]


def row_of(found: Roster, address: str) -> Row:
    (row,) = [row for row in found.members() if row.address == address]
    return row


def test_a_node_without_other_members_is_alone() -> None:
    assert roster().view().alone
    assert roster().settled
    assert not Roster(ME, GRACE_S).settled, "nothing was listed yet"
    assert Roster(ME, GRACE_S).next_deadline() == math.inf


def test_a_listed_address_joins_by_its_answer_with_the_name_that_it_tells() -> None:
    found = roster(A)
    assert found.due(0.0) == [A]
    assert not found.settled
    assert names(found) == ["me"]
    assert row_of(found, A).state == "unknown"
    found.greeted(A, node("b", weight=300), 0.1)
    assert found.settled
    assert found.view().members == (Member("b", 300), Member("me", 100))
    assert found.address_of("b") == A
    assert found.due(0.1) == []
    assert found.next_deadline() == pytest.approx(0.1 + GREET_S)
    assert found.due(0.1 + GREET_S) == [A]


def test_an_address_that_answers_with_this_nodes_instance_is_this_node_and_is_asked_no_more() -> None:
    found = roster(MY_ADDRESS, A)
    found.greeted(MY_ADDRESS, ME, 0.0)
    found.failed(MY_ADDRESS, 0.0)
    assert MY_ADDRESS not in found.due(1000.0)
    assert found.address_of("me") == ""
    assert names(found) == ["me"]
    assert row_of(found, MY_ADDRESS) == Row("me", MY_ADDRESS, "", 100, PROTOCOL_VERSION, "present")


def test_an_address_that_fails_is_greeted_again_after_pauses_that_double_up_to_a_limit() -> None:
    found, now, pauses = roster(A), 0.0, []
    for _ in range(8):
        assert found.due(now) == [A]
        found.failed(A, now)
        assert found.settled
        pauses.append(found.next_deadline() - now)
        now = found.next_deadline()
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    found.greeted(A, node("b"), now)
    found.failed(A, now + 1)
    assert found.next_deadline() == now + 2, "an answer ends the row of failures"


def test_a_greeting_that_gets_no_answer_at_all_is_sent_again() -> None:
    found = roster(A)
    assert found.due(0.0) == [A]
    assert found.due(GREET_RETRY_CAP_S - 1) == []
    assert found.due(GREET_RETRY_CAP_S) == [A]


@pytest.mark.parametrize("unlisted", [False, True])
def test_a_member_that_is_back_within_the_grace_period_moves_nothing(unlisted: bool) -> None:
    found = roster(A, B)
    found.greeted(A, node("b"), 0.0)
    found.greeted(B, node("c"), 0.0)
    placement = found.view().placement()
    if unlisted:
        found.listed([Endpoint(B)], 5.0)
    else:
        found.failed(A, 5.0)
    assert found.view().away == {"b"}
    assert found.view().placement() == placement
    (row,) = [row for row in found.members() if row.name == "b"]
    assert (row.state, row.since) == ("away", 5.0)
    found.listed([Endpoint(B), Endpoint(C)], GRACE_S)
    found.greeted(C, node("b", start=2), GRACE_S)
    assert found.view().away == frozenset(), "a restarted pod has another address"
    assert found.view().placement() == placement
    assert found.address_of("b") == C


def test_a_member_that_is_away_for_longer_than_the_grace_period_leaves() -> None:
    found = roster(A)
    found.greeted(A, node("b"), 0.0)
    found.listed([], 7.0)
    assert found.next_deadline() == 7.0 + GRACE_S
    assert found.due(6.9 + GRACE_S) == []
    assert names(found) == ["b", "me"]
    assert found.due(7.0 + GRACE_S) == []
    assert names(found) == ["me"]
    assert found.next_deadline() == math.inf


def test_of_two_nodes_with_one_name_the_second_is_refused_until_the_first_is_gone() -> None:
    found = roster(A, B)
    found.greeted(A, node("b", start=1), 0.0)
    found.greeted(B, node("b", start=2), 0.0)
    refused = row_of(found, B)
    assert refused.state == "refused"
    assert refused.why == f"b is the name of {A} too; give each node its own --node-name"
    assert found.address_of("b") == A
    assert found.due(GREET_S) == [A, B], "a refused node is greeted again"
    found.failed(A, GREET_S)
    found.greeted(B, node("b", start=2), GREET_S)
    assert found.address_of("b") == B
    assert row_of(found, B).state == "present"
    found.greeted(A, node("b", start=1), GREET_S + 1)
    assert row_of(found, A).state == "refused", "now it is the second one"


def test_a_node_with_this_nodes_name_is_refused() -> None:
    found = roster(A)
    found.greeted(A, replace(ME, instance="another"), 0.0)
    assert names(found) == ["me"]
    assert row_of(found, A).why == "me is this node's name too; give each node its own --node-name"


def test_a_restart_under_the_same_name_and_address_is_accepted_with_its_new_weight() -> None:
    found = roster(A)
    found.greeted(A, node("b", 1, 100), 0.0)
    found.greeted(A, node("b", 2, 200), 1.0)
    assert found.view().members[0] == Member("b", 200)


def test_a_node_that_speaks_an_old_version_is_refused_by_name() -> None:
    found = roster(A, B)
    found.greeted(A, replace(node("b"), version=OLDEST_VERSION - 1), 0.0)
    found.greeted(B, replace(node("c"), version=OLDEST_VERSION), 0.0)
    assert names(found) == ["c", "me"]
    assert "b speaks version" in row_of(found, A).why
    found.greeted(B, replace(node("c", 2), version=OLDEST_VERSION - 1), 1.0)
    assert found.view().away == {"c"}, "it was a member before it was rolled back"


def test_an_address_that_another_node_took_over_is_that_node() -> None:
    found = roster(A)
    found.greeted(A, node("b"), 0.0)
    found.greeted(A, node("c"), 1.0)
    assert names(found) == ["b", "c", "me"]
    assert found.view().away == {"b"}
    assert found.address_of("c") == A


def test_a_node_with_two_addresses_is_one_member() -> None:
    found = roster(A, B)
    found.greeted(A, node("b"), 0.0)
    found.greeted(B, node("b"), 0.0)
    assert found.address_of("b") == A
    assert [row.state for row in found.members()] == ["present", "present"]
    found.failed(A, 1.0)
    found.greeted(B, node("b"), 2.0)
    assert found.view().away == frozenset()
    assert found.address_of("b") == B


def test_zones_come_from_the_greeting_or_else_from_the_list() -> None:
    found = Roster(replace(ME, zone="z1"), GRACE_S)
    found.listed([Endpoint(A, zone="z1"), Endpoint(B, zone="z1"), Endpoint(C, "late", "z3")], 0.0)
    found.greeted(A, node("b"), 0.0)
    found.greeted(B, replace(node("c"), zone="z2"), 0.0)
    assert [(each.name, each.zone) for each in found.view().members] == [
        ("b", "z1"),
        ("c", "z2"),
        ("me", "z1"),
    ]
    assert found.view().names == ("b", "me"), "the other zone owns nothing here"
    assert (row_of(found, C).name, row_of(found, C).zone) == ("late", "z3")
    everywhere = Roster(ME, GRACE_S, by_zone=False)
    everywhere.listed([Endpoint(A, zone="z2")], 0.0)
    everywhere.greeted(A, node("b"), 0.0)
    assert everywhere.view().names == ("b", "me")


def test_an_answer_of_an_address_that_is_listed_no_more_is_ignored() -> None:
    found = roster(A)
    found.listed([], 0.0)
    found.greeted(A, node("b"), 0.0)
    found.failed(A, 0.0)
    assert names(found) == ["me"]


ADDRESSES = (A, B, C)
addresses = st.sampled_from(ADDRESSES)
greetings = st.one_of(
    st.just(ME),
    st.builds(node, st.sampled_from(["b", "c", "me"]), st.integers(1, 2), st.sampled_from([100, 200])),
    st.just(Greeting("b", "old", OLDEST_VERSION - 1, 100)),
)


class AnyHistory(RuleBasedStateMachine):
    """Lists, answers and failures in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.roster = Roster(ME, GRACE_S)
        self.now = 0.0
        self.seen_away: dict[str, float] = {}
        self.before: frozenset[str] = frozenset({"me"})

    @rule(seconds=st.sampled_from([0.5, 5.0, GRACE_S / 2, GRACE_S]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.roster.due(self.now)

    @rule(found=st.frozensets(addresses))
    def membership_lists(self, found: frozenset[str]) -> None:
        self.roster.listed([Endpoint(address) for address in sorted(found)], self.now)

    @rule(address=addresses, greeting=greetings)
    def an_address_answers(self, address: str, greeting: Greeting) -> None:
        self.roster.greeted(address, greeting, self.now)

    @rule(address=addresses)
    def an_address_fails(self, address: str) -> None:
        self.roster.failed(address, self.now)

    @rule()
    def the_next_deadline_comes(self) -> None:
        deadline = self.roster.next_deadline()
        if deadline < math.inf:
            members = self.roster.view().members
            self.now = max(self.now, deadline)
            assert self.roster.due(self.now) or self.roster.view().members != members, "a deadline of nothing"

    @invariant()
    def the_view_is_sound(self) -> None:
        view = self.roster.view()
        found = [member.name for member in view.members]
        assert found.count("me") == 1
        assert len(set(found)) == len(found)
        assert view.away < set(found)
        assert "me" not in view.away
        assert self.roster.view() is view
        present = {row.name: row for row in self.roster.members() if row.state == "present"}
        assert set(found) - view.away == present.keys()
        addressed = [self.roster.address_of(name) for name in found if name not in {"me", *view.away}]
        assert len(set(addressed)) == len(addressed)

    @invariant()
    def members_leave_after_the_grace_period_only(self) -> None:
        view = self.roster.view()
        members = frozenset(member.name for member in view.members)
        for name in self.before - members:
            assert self.now - self.seen_away[name] >= GRACE_S
        self.seen_away = {name: self.seen_away.get(name, self.now) for name in view.away}
        self.before = members


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_a_member_that_says_goodbye_keeps_its_share_and_is_no_trouble() -> None:
    found = roster(A, B)
    found.greeted(A, node("b"), 0.0)
    placement = found.view().placement()
    found.left("b", "another start", 1.0)
    assert row_of(found, A).state == "present", "a goodbye of an earlier start comes late"
    found.left("b", "b-1", 1.0)
    assert row_of(found, A).state == "left"
    assert found.view().away == {"b"}
    assert found.view().placement() == placement
    found.failed(A, 2.0)
    assert (row_of(found, A).state, row_of(found, A).since) == ("left", 1.0)
    found.listed([Endpoint(B)], 3.0)
    assert [row.state for row in found.members() if row.name == "b"] == ["left"]
    found.listed([Endpoint(A), Endpoint(B)], 4.0)
    found.greeted(A, node("b", start=2), 5.0)
    assert row_of(found, A).state == "present"
    found.failed(A, 6.0)
    assert row_of(found, A).state == "away"


def test_a_member_that_is_back_is_greeted_as_soon_as_it_greets() -> None:
    found = roster(A)
    found.greeted(A, node("b"), 0.0)
    assert not found.heard("b", 1.0), "it is present"
    for _ in range(6):
        found.failed(A, 10.0)
    assert found.due(11.0) == []
    assert found.heard("b", 11.0) == A
    assert found.due(11.0) == [A]


def test_an_operator_removes_a_member_that_is_away() -> None:
    found = roster(A, B)
    found.greeted(A, node("b"), 0.0)
    assert not found.forget("b"), "it is present"
    assert not found.forget("nobody")
    found.failed(A, 1.0)
    assert found.lists(A)
    assert found.forget("b")
    assert names(found) == ["me"]
    assert {row.address for row in found.members()} == {"", B}, "its address is no trouble until it answers"
    found.failed(A, 2.0)
    assert {row.address for row in found.members()} == {"", B}
    found.greeted(A, node("b"), 3.0)
    assert names(found) == ["b", "me"]


def test_a_node_that_is_two_versions_ahead_is_refused() -> None:
    found = roster(A, B)
    found.greeted(A, replace(node("next"), version=PROTOCOL_VERSION + 1), 0.0)
    found.greeted(B, replace(node("later"), version=PROTOCOL_VERSION + 2), 0.0)
    assert row_of(found, A).state == "present"
    assert row_of(found, B).state == "refused"
    assert "this node speaks" in row_of(found, B).why
