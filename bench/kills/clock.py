"""Counts of kills and times of starts, by kind of process."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

START_S = 10.0
"""A killed process must serve again within this time, without any clean-up."""


@dataclass(slots=True)
class Row:
    """Counts of one kind of process."""

    kills: int = 0
    early: int = 0
    """Kills that came before the victim served."""
    starts_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Median time of the completed starts; 0 without any."""
        return median(self.starts_s) if self.starts_s else 0.0


@dataclass(slots=True)
class Clock:
    """Kills and starts of the whole drill. Starts that took too long are in `late`; these mean nothing on a machine
    that is busy with other work."""

    rows: dict[str, Row] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    def row(self, kind: str) -> Row:
        """The row of a kind, created on first use."""
        return self.rows.setdefault(kind, Row())

    def killed(self, kind: str, serving: bool) -> None:
        """Count one kill; `serving` says whether the victim had begun to serve."""
        row = self.row(kind)
        row.kills += 1
        row.early += not serving

    def served(self, kind: str, after_s: float, daemons: int = 0) -> None:
        """Record that a process served `after_s` seconds after its start or its worker's death; meanwhile `daemons`
        daemons that it needed were killed."""
        self.row(kind).starts_s.append(after_s)
        if after_s > START_S:
            meanwhile = f", while the daemon was killed {daemons} times" if daemons else ""
            self.late.append(f"{kind}: served after {after_s:.1f} s{meanwhile}")
