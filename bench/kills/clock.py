"""How long starts took, by who was started and how."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median

START_S = 10.0
"""Whoever was killed serves again within this, and nobody cleans up before."""


@dataclass(slots=True)
class Row:
    """Of one kind of party."""

    kills: int = 0
    early: int = 0
    """Those of them that came before the victim served."""
    starts_s: list[float] = field(default_factory=list)

    @property
    def median_s(self) -> float:
        """Of the starts that came to their end; 0 where none did."""
        return median(self.starts_s) if self.starts_s else 0.0


@dataclass(slots=True)
class Clock:
    """One for the whole drill. What took too long is in `late`: on a machine that is busy with other things, that
    says nothing."""

    rows: dict[str, Row] = field(default_factory=dict)
    late: list[str] = field(default_factory=list)

    def row(self, kind: str) -> Row:
        """The row of a kind."""
        return self.rows.setdefault(kind, Row())

    def killed(self, kind: str, serving: bool) -> None:
        """One more of that kind."""
        row = self.row(kind)
        row.kills += 1
        row.early += not serving

    def served(self, kind: str, after_s: float, daemons: int = 0) -> None:
        """A party of that kind served so long after its start, or after its worker's death; meanwhile so many daemons that
        it needed were killed."""
        self.row(kind).starts_s.append(after_s)
        if after_s > START_S:
            meanwhile = f", while the daemon was killed {daemons} times" if daemons else ""
            self.late.append(f"{kind}: served after {after_s:.1f} s{meanwhile}")
