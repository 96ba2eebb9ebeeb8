"""The agent's reports to the daemon about the cluster."""

from __future__ import annotations

from dataclasses import dataclass

from cachesvc.core.placement.roster import Row
from cachesvc.core.placement.view import Member, View
from cachesvc.daemon.peers.members import Contact


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A member or a refused node, for `cachesvc nodes`. `away_s`: for how long it has been away."""

    name: str
    address: str
    zone: str
    release: str
    weight_bytes: int
    extents: int
    state: str
    away_s: int
    why: str
    round_trip_us: int

    @classmethod
    def of(cls, row: Row, contact: Contact, now: float) -> NodeRow:
        """The row of a member of the roster, at time `now`."""
        return cls(
            name=row.name,
            address=row.address,
            zone=row.zone,
            release=contact.release,
            weight_bytes=row.weight_bytes,
            extents=contact.extents,
            state=row.state,
            away_s=int(now - row.since) if row.state == "away" else 0,
            why=row.why or ("" if row.state == "present" else contact.error),
            round_trip_us=int(contact.round_trip_s * 1e6),
        )


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The cluster as the agent sees it. `rows` are all members, present or not."""

    me: str = ""
    settled: bool = False
    by_zone: bool = False
    members: tuple[Member, ...] = ()
    away: frozenset[str] = frozenset()
    rows: tuple[NodeRow, ...] = ()
    sent_bytes: int = 0
    lookups: int = 0
    redirects: int = 0

    def view(self) -> View:
        """The view among which extents are placed."""
        return View(self.me, self.members, self.away, self.by_zone)
