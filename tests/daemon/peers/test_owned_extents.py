"""A stand-in's answers about an extent that it is filling itself, by the answer of an owner that is away now."""

from __future__ import annotations

import pytest

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.directory import SOURCE
from cachesvc.daemon.peers.owned_extents import OwnedExtents, Question

ME = "stand-in"
EXTENT = ExtentId(bytes(16))
FRESH, INTERRUPTED = Question(EXTENT), Question(EXTENT, ("owner",))


@pytest.fixture
def owned() -> OwnedExtents:
    """The stand-in fills all that it is asked for."""
    return OwnedExtents(ME, lambda extents, later: set(extents))


def asked(owned: OwnedExtents, asker: str, question: Question) -> str:
    (answer,) = owned.find(asker, [question])
    return answer.node


def test_an_interrupted_fill_is_not_sent_to_what_may_read_from_it(owned: OwnedExtents) -> None:
    owned.located(EXTENT, "follower")  # and the follower reads from the first node
    assert asked(owned, "new", FRESH) == ME
    assert asked(owned, "first", INTERRUPTED) == SOURCE
    assert asked(owned, "second", INTERRUPTED) == "first"


def test_an_interrupted_fill_follows_a_stand_in_that_reads_the_source(owned: OwnedExtents) -> None:
    owned.located(EXTENT, SOURCE)
    assert asked(owned, "first", INTERRUPTED) == ME


def test_a_stand_in_that_asked_itself_is_followed(owned: OwnedExtents) -> None:
    assert asked(owned, "first", INTERRUPTED) == ME
    owned.report("first", [EXTENT], [], [], anew=False)
    assert asked(owned, ME, INTERRUPTED) == "first"
    owned.located(EXTENT, "first")
    assert asked(owned, "second", INTERRUPTED) in (ME, "first")


def test_once_the_fill_has_ended_it_is_followed_again(owned: OwnedExtents) -> None:
    owned.located(EXTENT, "follower")
    owned.report(ME, [EXTENT], [], [], anew=False)
    assert asked(owned, "first", INTERRUPTED) == ME
