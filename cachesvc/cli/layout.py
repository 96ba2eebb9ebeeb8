"""Lays tables out in lines of a given width: pure functions of text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cachesvc.core.safe_text import printable

GAP = 2
"""Spaces between columns."""
LEAST_CHARACTERS, LEAST_OPTIONAL = 24, 16
"""To so many a long cell is shortened before an optional column is left out: one of a needed column, or an optional one."""
ELLIPSIS = ".."


@dataclass(frozen=True, slots=True)
class Column:
    """A column by its header. Marks at the end of the header: `>` right-aligned; `~` shortened in the middle where the line
    is too long; `?` left out where it still is, the last such column first."""

    title: str
    right: bool
    shortens: bool
    optional: bool

    @staticmethod
    def of(header: str) -> Column:
        """Parse a header."""
        title = header.rstrip(">~?")
        marks = header[len(title) :]
        return Column(title, ">" in marks, "~" in marks, "?" in marks)


def lines(headers: Sequence[str], rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
    """Return the header and the rows as lines, of at most `width` characters as far as the marks of the columns allow.
    Columns without a title and without text are left out."""
    columns = [Column.of(header) for header in headers]
    cells = [[printable(cell) for cell in row] for row in rows]
    shown = [n for n, each in enumerate(columns) if each.title or any(row[n] for row in cells)]
    widths = {n: max(len(columns[n].title), *(len(row[n]) for row in cells), 0) for n in shown}
    if width is not None:
        shown = _fitting(columns, shown, widths, width)
        _shorten(columns, shown, widths, width)
    return [
        _line(columns, shown, widths, [each.title for each in columns]),
        *(_line(columns, shown, widths, row) for row in cells),
    ]


def middle(text: str, width: int) -> str:
    """Shorten a text in the middle: the beginning and the end of a URI tell most."""
    if len(text) <= width:
        return text
    if width < 2 * len(ELLIPSIS):
        return text[:width]
    tail = (width - len(ELLIPSIS)) * 3 // 5
    return f"{text[: width - len(ELLIPSIS) - tail]}{ELLIPSIS}{text[-tail:]}"


def _least(column: Column, width: int) -> int:
    return min(width, LEAST_OPTIONAL if column.optional else LEAST_CHARACTERS) if column.shortens else width


def _total(shown: Sequence[int], widths: dict[int, int]) -> int:
    return sum(widths[n] for n in shown) + GAP * max(0, len(shown) - 1)


def _fitting(columns: Sequence[Column], shown: list[int], widths: dict[int, int], width: int) -> list[int]:
    """Leave out optional columns until the line fits, with long cells as short as they may be."""
    least = {n: _least(columns[n], widths[n]) for n in shown}
    while _total(shown, least) > width:
        optional = [n for n in shown if columns[n].optional]
        if not optional:
            break
        shown = [n for n in shown if n != optional[-1]]
    return shown


def _shorten(columns: Sequence[Column], shown: Sequence[int], widths: dict[int, int], width: int) -> None:
    """Shorten the widest of the columns that may be shortened until the line fits, optional ones first."""
    excess = _total(shown, widths) - width
    while excess > 0:
        long = [n for n in shown if widths[n] > _least(columns[n], widths[n])]
        if not long:
            return
        long = [n for n in long if columns[n].optional] or long
        widest = max(long, key=lambda n: widths[n])
        widths[widest] -= 1
        excess -= 1


def _line(
    columns: Sequence[Column], shown: Sequence[int], widths: dict[int, int], cells: Sequence[str]
) -> str:
    parts = []
    for n in shown:
        cell = middle(cells[n], widths[n]) if columns[n].shortens else cells[n]
        parts.append(cell.rjust(widths[n]) if columns[n].right else cell.ljust(widths[n]))
    return (" " * GAP).join(parts).rstrip()
