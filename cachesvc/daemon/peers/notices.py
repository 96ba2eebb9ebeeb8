"""Records an event, and so a log line, for each member that joins, goes away, comes back, leaves or is refused, with the
reason, and the warnings of `core/placement/traits.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cachesvc.core.placement.traits import Noticed
from cachesvc.daemon.events.event import Event, record
from cachesvc.daemon.peers.messages import ClusterReport, NodeRow

_SICK = ("slow", "unreadable", "wrong")
"""The states of members from which nothing is read; of this node's row, that nothing is read from its source."""
_MEMBERS = ("present", *_SICK, "away", "left")
_BECAME = {
    "present": "member_present",
    "slow": "left_out",
    "unreadable": "left_out",
    "wrong": "left_out",
    "away": "member_away",
    "left": "member_left",
    "refused": "member_refused",
    "unknown": "member_silent",
}
"""The kind of event for each new state."""


def changes(before: Sequence[NodeRow], after: Sequence[NodeRow]) -> list[Event]:
    """Return what happened to the nodes between two lists of rows. An address that was not heard of and has no error yet
    gives no event."""
    had, has = _by_key(before), _by_key(after)
    found = []
    for key, row in has.items():
        if (old := had.get(key)) is not None and _same(old, row):
            continue
        if old is not None and old.state in _SICK and row.state == "present":
            found.append(_event("read_again", row))
        elif row.state != "unknown" or row.why:
            found.append(_event(_BECAME[row.state], row))
    gone = [row for key, row in had.items() if key not in has and row.state in _MEMBERS]
    return found + [_event("member_gone", row) for row in gone]


def _same(old: NodeRow, row: NodeRow) -> bool:
    """Return whether nothing happened to a node that is worth an event. The reason why a member is away may change."""
    if old.state in _SICK and row.state in _SICK:
        return True
    return old.state == row.state and (row.state in _MEMBERS or old.why == row.why)


def _by_key(rows: Iterable[NodeRow]) -> dict[tuple[str, str], NodeRow]:
    """Return members by name, and others by address: two nodes of one name are one member and one that is refused."""
    return {(each.name, "") if each.state in _MEMBERS else ("", each.address): each for each in rows}


def _event(kind: str, row: NodeRow) -> Event:
    address = row.address if row.name else ""
    return Event(kind, node=row.name or row.address, why=": ".join(filter(None, [address, row.why])))


class Notices:
    """Records the events. Nodes that are present in the first report were there before, and give none."""

    def __init__(self) -> None:
        self._rows: Sequence[NodeRow] | None = None
        self._noticed = Noticed()

    def update(self, report: ClusterReport, now: float) -> None:
        """Take a report at `now`, in seconds of any clock that does not go back. A new agent's reports count once it has
        greeted all members."""
        if not report.settled and report.list_read:
            return
        if report.settled:
            before = self._rows
            if before is None:
                before = [each for each in report.rows if each.state == "present"]
            for event in changes(before, report.rows):
                record(event)
            self._rows = report.rows
        new, gone = self._noticed.update(report.warnings, now)
        for each in new:
            record(Event("cluster_warning", why=each.text))
        for each in gone:
            record(Event("cluster_mended", why=each.text))
