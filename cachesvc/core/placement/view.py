"""A view of the cluster: the members that own extents, and which of them do not answer now.

An extent's owner is the first of its ranked members. A member that is away keeps what it owns; meanwhile the next member
in rank stands in for it. Where a view is `by_zone`, the members of each zone own every extent once. So no extent crosses
zones, and two zones have one copy each.
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
    def _every(self) -> _Ranking:
        return _Ranking(self.candidates)

    @cached_property
    def _present(self) -> _Ranking:
        if not self.away:
            return self._every
        return _Ranking([each for each in self.candidates if each.name not in self.away])


class _Ranking:
    """Some members, by name, and their order for each extent."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._names = [each.name for each in members]
        self._rendezvous = Rendezvous(self._names, [max(1, each.weight_bytes) for each in members])

    def names_of(self, extents: Sequence[ExtentId], count: int) -> list[tuple[str, ...]]:
        """The names of the best members of each extent."""
        names, rows = self._names, self._rendezvous.ranks(extents, count).tolist()
        return [tuple(names[at] for at in row) for row in rows]
