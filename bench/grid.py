"""A table that renders for a terminal and as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table


@dataclass(frozen=True)
class Grid:
    """A table with a title. Rows shorter than `head`, such as (name, error), are padded with empty cells."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        """Render as Markdown, below a line with the title."""
        lines = [list(self.head), ["---"] + ["---:"] * (len(self.head) - 1), *map(self._full, self.rows)]
        return f"**{self.title}**\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"

    def rich(self) -> Table:
        """Render for a terminal."""
        table = Table(title=self.title, title_justify="left")
        for number, name in enumerate(self.head):
            table.add_column(name, justify="right" if number else "left")
        for row in self.rows:
            table.add_row(*self._full(row))
        return table

    def _full(self, row: Sequence[str]) -> list[str]:
        return [*row, *[""] * (len(self.head) - len(row))]


def spread(values: Sequence[float], form: str = ",.0f") -> str:
    """Median (lowest-highest)."""
    return f"{statistics.median(values):{form}} ({min(values):{form}}-{max(values):{form}})"
