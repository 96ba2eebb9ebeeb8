"""Extents are spread by weight, move no more than they must, and have the same owners on every node."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.view import BLOCK_SCORES, Member, Ranking, View

EXTENTS = [ExtentId(random.Random(at).randbytes(16)) for at in range(2000)]
MANY = [ExtentId(row.tobytes()) for row in np.random.default_rng(7).integers(0, 1 << 63, (100_000, 2))]
names = st.text("abcdefgh-0123456789", min_size=1, max_size=12)
members_by_name = st.dictionaries(
    names, st.tuples(st.integers(1, 1 << 44), st.sampled_from(["", "a", "b"])), min_size=1, max_size=12
)


def view(members: list[Member], away: frozenset[str] = frozenset(), by_zone: bool = False) -> View:
    """The view of the first member."""
    return View(members[0].name, tuple(members), away, by_zone)


def equal(count: int) -> list[Member]:
    """Members of equal weights, named as a Slurm cluster names its nodes."""
    return [Member(f"node{at:03}", 1 << 40) for at in range(1, count + 1)]


def members(drawn: dict[str, tuple[int, str]]) -> list[Member]:
    return [Member(name, weight, zone) for name, (weight, zone) in drawn.items()]


@pytest.mark.parametrize("count", [2, 3, 8, 16, 33, 64])
def test_members_of_equal_weight_own_equally_many_to_within_a_tenth(count: int) -> None:
    owned = Counter(row[0] for row in view(equal(count)).ranked(MANY, 1))
    assert len(owned) == count
    assert max(owned.values()) <= 1.1 * len(MANY) / count


@pytest.mark.parametrize("count", [2, 3, 8, 16, 33, 64])
def test_a_member_that_comes_or_goes_moves_only_what_it_owns(count: int) -> None:
    every = equal(count)
    without = view(every[:-1]).ranked(MANY, 1)
    owned = view(every).ranked(MANY, 1)
    moved = [after for before, after in zip(without, owned, strict=True) if before != after]
    assert set(moved) == {(every[-1].name,)}
    assert len(moved) <= 1.2 / count * len(MANY)


@given(members_by_name, st.integers(0, 99))
def test_extents_of_a_member_that_goes_move_to_the_next_in_rank(
    drawn: dict[str, tuple[int, str]], pick: int
) -> None:
    every = members(drawn)
    gone = every[pick % len(every)]
    rest = [each for each in every if each is not gone]
    if rest:
        before, after = view(every).ranked(EXTENTS[:50], 2), view(rest).ranked(EXTENTS[:50], 1)
        assert after == [(row[1] if row[0] == gone.name else row[0],) for row in before]


@pytest.mark.parametrize("weights", [(1, 2, 3, 4), (1, 1, 1, 9), (5, 0.5, 20, 1)])
def test_shares_follow_weights(weights: tuple[float, ...]) -> None:
    every = [Member(f"n{at}", int(weight * 2**30)) for at, weight in enumerate(weights)]
    owned = Counter(row[0] for row in view(every).ranked(MANY, 1))
    for member, weight in zip(every, weights, strict=True):
        assert owned[member.name] / len(MANY) == pytest.approx(weight / sum(weights), rel=0.05)


@given(members_by_name, st.randoms(use_true_random=False), st.booleans())
def test_every_node_of_a_zone_finds_the_same_owners_whatever_the_order_of_members(
    drawn: dict[str, tuple[int, str]], shuffler: random.Random, by_zone: bool
) -> None:
    every = members(drawn)
    first = view(every, by_zone=by_zone)
    for me in every:
        if not by_zone or me.zone == every[0].zone:
            shuffled = [*every]
            shuffler.shuffle(shuffled)
            other = View(me.name, tuple(shuffled), by_zone=by_zone)
            assert other.ranked(EXTENTS[:30], 3) == first.ranked(EXTENTS[:30], 3)
            assert other.placement() == first.placement()


@given(members_by_name)
def test_each_zone_owns_every_extent_once(drawn: dict[str, tuple[int, str]]) -> None:
    every = members(drawn)
    owners: Counter[tuple[str, ExtentId]] = Counter()
    for me in every:
        own = View(me.name, tuple(every), by_zone=True)
        assert {each.zone for each in own.candidates} == {me.zone}
        for extent, mine in zip(EXTENTS[:40], own.owned(EXTENTS[:40]), strict=True):
            owners[me.zone, extent] += mine
    assert set(owners.values()) == {1}
    assert len(owners) == 40 * len({each.zone for each in every})


def test_without_zones_two_zones_own_each_extent_once_together() -> None:
    every = [replace(each, zone="ab"[at % 2]) for at, each in enumerate(equal(4))]
    owners = [
        sum(View(me.name, tuple(every)).owned([extent]) == [True] for me in every) for extent in EXTENTS
    ]
    assert set(owners) == {1}


@given(members_by_name, st.sets(st.integers(0, 11)))
def test_a_member_that_is_away_keeps_its_share_and_the_next_in_rank_is_asked(
    drawn: dict[str, tuple[int, str]], gone: set[int]
) -> None:
    every = members(drawn)
    away = frozenset(every[at].name for at in gone if at < len(every))
    now, before = view(every, away), view(every)
    assert now.ranked(EXTENTS[:40]) == before.ranked(EXTENTS[:40])
    assert now.placement() == before.placement()
    everyone = before.ranked(EXTENTS[:40], len(every))
    expected = [tuple(name for name in row if name not in away)[:2] for row in everyone]
    assert now.askable(EXTENTS[:40]) == expected


def test_a_node_alone_owns_everything() -> None:
    lone = view([Member("only", 0)])
    assert lone.alone
    assert lone.owned(EXTENTS[:10]) == [True] * 10
    assert lone.ranked(EXTENTS[:1]) == [("only",)]
    assert lone.ranked([]) == []
    assert view([Member("only", 0)], frozenset({"only"})).askable(EXTENTS[:1]) == [()]


@settings(max_examples=5)  # each ranks 262,144 scores
@given(st.lists(st.integers(0, 1 << 50), min_size=1, max_size=200), st.integers(1, 5))
def test_a_batch_beyond_one_block_ranks_as_each_extent_alone(weights: list[int], count: int) -> None:
    ranking = Ranking([Member(f"n{at}", weight) for at, weight in enumerate(weights)])
    batch = (EXTENTS * (BLOCK_SCORES // len(weights) // len(EXTENTS) + 2))[: BLOCK_SCORES // len(weights) + 3]
    ranks = ranking.names_of(batch[-4:], count)
    assert ranking.names_of(batch, count)[-4:] == ranks
    for extent, row in zip(batch[-4:], ranks, strict=True):
        assert ranking.names_of([extent], count) == [row]
        assert len(set(row)) == min(count, len(weights))
