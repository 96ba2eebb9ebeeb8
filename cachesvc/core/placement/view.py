"""A view of the cluster: the members that own extents, and which of them do not answer now.

An extent's owner is the first of its ranked members. A member that is away keeps what it owns; meanwhile the next member
in rank stands in for it. With a `domain` of zones each zone owns every extent once, so no extent crosses zones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.rendezvous import Rendezvous

STAND_INS = 2
"""Members that know where an extent is: the owner, and the next in rank, who stands in while the owner is away."""


@dataclass(frozen=True, slots=True)
class Member:
    """A node. `weight_bytes`: the room of its tiers, as configured."""

    name: str
    weight_bytes: int
    zone: str = ""


@dataclass(frozen=True)
class View:
    """`members` own extents and include this node, `me`; names in `away` are not asked now. Members are sorted by name."""

    me: str
    members: tuple[Member, ...]
    away: frozenset[str] = frozenset()

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of all members."""
        return tuple(member.name for member in self.members)

    @cached_property
    def capacity_bytes(self) -> int:
        """The room of all members together."""
        return sum(member.weight_bytes for member in self.members)

    def weight_of(self, name: str) -> int:
        """The weight of a member, in bytes."""
        return next(member.weight_bytes for member in self.members if member.name == name)

    @property
    def alone(self) -> bool:
        """There is no other member."""
        return len(self.members) < 2

    def ranked(self, extents: Sequence[ExtentId], count: int = STAND_INS) -> list[tuple[str, ...]]:
        """The names of the `count` best members of each extent, the owner first."""
        if not extents:
            return []
        names = self.names
        return [tuple(names[at] for at in row) for row in self._rendezvous.ranks(extents, count).tolist()]

    def askable(self, extents: Sequence[ExtentId]) -> list[tuple[str, ...]]:
        """For each extent, the members to ask where it is: the best ones that are not away, the owner first."""
        if not self.away:
            return self.ranked(extents)
        count = STAND_INS + len(self.away)
        rows = self.ranked(extents, count)
        return [tuple(name for name in row if name not in self.away)[:STAND_INS] for row in rows]

    def owned(self, extents: Sequence[ExtentId]) -> list[bool]:
        """Whether this node owns each extent."""
        return [row[0] == self.me for row in self.ranked(extents, 1)]

    def placement(self) -> frozenset[Member]:
        """What ownership depends on: two views with equal placements have the same owners."""
        return frozenset(self.members)

    @cached_property
    def _rendezvous(self) -> Rendezvous:
        return Rendezvous(self.names, [max(1, member.weight_bytes) for member in self.members])
