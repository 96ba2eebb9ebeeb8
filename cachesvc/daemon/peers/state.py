"""What the agent tells the daemon about the cluster."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from cachesvc.core.placement.roster import MemberRow
from cachesvc.core.placement.view import Member, View


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A member, for `cachesvc nodes`."""

    name: str
    address: str
    zone: str
    version: str
    weight_bytes: int
    extents: int
    state: str
    since_s: float
    why: str
    round_trip_s: float

    @classmethod
    def of(cls, row: MemberRow, round_trip_s: float) -> NodeRow:
        """The row of a member of the roster."""
        return cls(
            row.name,
            row.address,
            row.zone,
            row.version,
            row.weight_bytes,
            row.extents,
            row.state,
            round(row.since_s),
            row.why,
            round_trip_s,
        )


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The cluster as the agent sees it; `members`, `away` and `rows` are of plain types."""

    me: str = ""
    settled: bool = False
    by_zone: bool = False
    members: tuple[dict[str, Any], ...] = ()
    away: tuple[str, ...] = ()
    rows: tuple[dict[str, Any], ...] = ()
    sent_bytes: int = 0
    lookups: int = 0
    redirects: int = 0

    def packed(self) -> str:
        """The report as text."""
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, text: str) -> ClusterReport:
        """The inverse of `packed`. Raises ValueError or TypeError for anything else."""
        found = json.loads(text)
        report = cls(**found | {name: tuple(found[name]) for name in ("members", "away", "rows")})
        report.view()
        return report

    def view(self) -> View:
        """The view among which extents are placed."""
        members = tuple(Member(**member) for member in self.members)
        return View(self.me, members, frozenset(self.away), self.by_zone)

    def nodes(self) -> list[NodeRow]:
        """All members, present or not."""
        return [NodeRow(**row) for row in self.rows]
