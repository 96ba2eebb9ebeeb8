"""The node under any order of events: every invariant after each step, and every waiter answered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test

from cachesvc.core.records.copy_phases import TRANSITIONS, CopyEvent, Phase
from tests.support.core.machine import NodeMachine

SETTINGS = settings(
    max_examples=80,
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)

TestNode = NodeMachine.TestCase
TestNode.settings = SETTINGS


class TransitionsTaken(Mapping[tuple[Phase, CopyEvent], Phase]):
    """The table of a copy's transitions, which notes those that are looked up."""

    def __init__(self) -> None:
        self.taken = set[tuple[Phase, CopyEvent]]()

    def __getitem__(self, transition: tuple[Phase, CopyEvent]) -> Phase:
        self.taken.add(transition)
        return TRANSITIONS[transition]

    def __iter__(self) -> Iterator[tuple[Phase, CopyEvent]]:
        return iter(TRANSITIONS)

    def __len__(self) -> int:
        return len(TRANSITIONS)


@pytest.mark.slow
def test_random_walks_take_every_transition_of_a_copy_and_no_other() -> None:
    class Recorded(NodeMachine):
        transitions = TransitionsTaken()

    walks = settings(SETTINGS, max_examples=300, derandomize=True, database=None)
    run_state_machine_as_test(Recorded, settings=walks)
    assert Recorded.transitions.taken == TRANSITIONS.keys()
