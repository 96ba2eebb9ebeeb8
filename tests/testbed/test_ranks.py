"""A ledger of ranks names what was read wrong, twice or never; schedules of faults depend on their seed alone."""

from __future__ import annotations

from testbed.chaos import ANYWHERE, BY_LINK, schedule
from testbed.ranks import Ledger, Step
from testbed.records import Records


def ledger(*steps: Step) -> Ledger:
    return Ledger(Records("s3://bucket/", 4096, (10, 11)), list(steps))


def test_an_exact_ledger_has_no_faults() -> None:
    found = ledger(Step(0, 0, 1, 11, 0.1), Step(1, 0, 0, 10, 0.3))
    assert found.faults(1) == []
    assert found.longest.rank == 1


def test_wrong_bytes_are_a_fault() -> None:
    (fault,) = ledger(Step(0, 0, 1, 12, 0.1), Step(1, 0, 0, 10, 0.3)).faults(1)
    assert fault.startswith("wrong bytes")


def test_extents_that_are_missing_or_read_twice_are_a_fault() -> None:
    assert ledger(Step(0, 0, 1, 11, 0.1)).faults(1) == ["epoch 0: 1 reads of 1 extents"]
    twice = ledger(Step(0, 0, 1, 11, 0.1), Step(1, 0, 1, 11, 0.1))
    assert twice.faults(1) == ["epoch 0: 2 reads of 1 extents"]


def test_an_error_of_a_rank_is_a_fault() -> None:
    found = ledger()
    found.errors.append("rank 0: it ended")
    assert found.faults(0) == ["rank 0: it ended"]


def test_a_seed_gives_the_same_faults_in_order() -> None:
    found = schedule(7, events=200, nodes=4, steps=1000, links=True)
    assert found == schedule(7, events=200, nodes=4, steps=1000, links=True)
    assert found != schedule(8, events=200, nodes=4, steps=1000, links=True)
    assert [event.after_steps for event in found] == sorted(event.after_steps for event in found)
    assert {event.kind for event in found} == {*ANYWHERE, *BY_LINK}
    assert {event.node for event in found} == set(range(4))


def test_faults_of_links_are_left_out_without_links() -> None:
    found = schedule(7, events=200, nodes=4, steps=1000, links=False)
    assert {event.kind for event in found} == set(ANYWHERE)
