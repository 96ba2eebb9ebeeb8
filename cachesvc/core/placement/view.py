"""A view of the cluster: the members that own extents, and which of them do not answer now.

An extent's owner is the first of its ranked members. A member that is away keeps what it owns; meanwhile the next member
in rank stands in for it. Where a view is `by_zone`, the members of each zone own every extent once. So no extent crosses
zones, and two zones have one copy each.

Members are ranked by weighted rendezvous hashing. Each pair of member and extent has a score, and the member with the
highest score owns the extent (Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates", 1998). The score
is -weight / ln(u), where u is a hash of the pair in (0, 1), so a member owns extents in proportion to its weight
(Schindelhauer and Schomaker, "Weighted Distributed Hash Tables", 2005). When a member comes or goes, only the extents that
it owns move. A score depends on no other member, so the order of some members is their order among all.

The logarithms of two processors may differ in the last bit. Members whose scores differ by no more than that may change
places, once in some 10^14 extents, and the cost is a second fetch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from cachesvc.core.model import ExtentId

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
STAND_INS = 2
"""Members that know where an extent is: the owner, and the next in rank, which stands in while the owner is away."""
BLOCK_SCORES = 1 << 18
"""Scores that are computed at once: 2 MiB of floats, which stay in a processor's cache."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node. `weight_bytes`: the room of its tiers, as configured."""

    name: str
    weight_bytes: int
    zone: str = ""


@dataclass(frozen=True)
class View:
    """The cluster as the node `me` sees it. `members`, in any order, have distinct names and include this node. Names in
    `away` are not asked now."""

    me: str
    members: tuple[Member, ...]
    away: frozenset[str] = frozenset()
    by_zone: bool = False

    @cached_property
    def candidates(self) -> tuple[Member, ...]:
        """The members that may own extents here, by name: all, or those of this node's zone."""
        zones = {member.zone for member in self.members if member.name == self.me}
        mine = (each for each in self.members if not self.by_zone or each.zone in zones)
        return tuple(sorted(mine, key=lambda each: each.name))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all candidates, sorted."""
        return tuple(member.name for member in self.candidates)

    @cached_property
    def capacity_bytes(self) -> int:
        """The room of all candidates together."""
        return sum(member.weight_bytes for member in self.candidates)

    def weight_of(self, name: str) -> int:
        """The weight of a member, in bytes."""
        return next(member.weight_bytes for member in self.members if member.name == name)

    @property
    def alone(self) -> bool:
        """No other member is a candidate."""
        return len(self.candidates) < 2

    def ranked(self, extents: Sequence[ExtentId], count: int = STAND_INS) -> list[tuple[str, ...]]:
        """The names of the `count` best candidates of each extent, the owner first, whether they are away or not."""
        return self._every.names_of(extents, count)

    def askable(self, extents: Sequence[ExtentId], count: int = STAND_INS) -> list[tuple[str, ...]]:
        """The `count` members to ask for each extent where it is: the best candidates that are not away, in their rank."""
        return self._present.names_of(extents, count)

    def owned(self, extents: Sequence[ExtentId]) -> list[bool]:
        """Return whether this node owns each extent."""
        return [row[0] == self.me for row in self.ranked(extents, 1)]

    def placement(self) -> frozenset[Member]:
        """The members on which ownership depends: two views of a node with equal placements have the same owners."""
        return frozenset(self.candidates)

    @cached_property
    def _every(self) -> Ranking:
        return Ranking(self.candidates)

    @cached_property
    def _present(self) -> Ranking:
        if not self.away:
            return self._every
        return Ranking([each for each in self.candidates if each.name not in self.away])


class Ranking:
    """Some members, and their order for each extent."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._names = [each.name for each in members]
        hashes = (blake2b(name.encode(), digest_size=8).digest() for name in self._names)
        self._seeds: U64 = np.array([int.from_bytes(each, "little") for each in hashes], np.uint64)
        self._weights: F64 = np.array([max(1, each.weight_bytes) for each in members], np.float64)

    def names_of(self, extents: Sequence[ExtentId], count: int) -> list[tuple[str, ...]]:
        """The names of the `count` best members of each extent, the best first; fewer where there are fewer members.
        O(extents x members) time."""
        names = self._names
        return [
            tuple(names[at] for at in row) for row in self._ranks(extents, min(count, len(names))).tolist()
        ]

    def _ranks(self, extents: Sequence[ExtentId], count: int) -> I64:
        """The indices of these members, [extents, count]."""
        ranks: I64 = np.zeros((len(extents), count), np.int64)
        if not count:
            return ranks
        step = max(1, BLOCK_SCORES // len(self._seeds))
        for start in range(0, len(extents), step):
            scores = self._scores(extents[start : start + step])
            for column in range(count):
                best = np.argmax(scores, axis=1)
                ranks[start : start + step, column] = best
                scores[np.arange(len(scores)), best] = 0.0
        return ranks

    def _scores(self, extents: Sequence[ExtentId]) -> F64:
        halves = np.frombuffer(b"".join(extents), "<u8").reshape(len(extents), 2)
        mixed = _mix((halves[:, 0] ^ _mix(halves[:, 1]))[:, None] ^ self._seeds[None, :])
        uniform = ((mixed >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52  # exact, so neither 0 nor 1
        scores: F64 = self._weights / -np.log(uniform)
        return scores


def _mix(values: U64) -> U64:
    """The finalizer of SplitMix64 (Steele, Lea, Flood, 2014): a bijection that spreads every bit."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: U64 = values ^ (values >> np.uint64(31))
    return mixed
