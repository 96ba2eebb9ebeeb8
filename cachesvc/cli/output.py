"""Prints results: text and tables for people, JSON for programs, and never both in one. Lays tables out in lines."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cachesvc.core.errors import CacheError, OutOfSpace
from cachesvc.core.safe_text import printable
from cachesvc.v1.plain import plain as plain

if TYPE_CHECKING:
    from rich.console import Console

    from cachesvc.v1 import cachesvc_pb2 as pb

COLUMNS = 1000
"""Width of tables, and of all output that does not go to a terminal: their lines are never folded."""
LINES = 25
"""Given with the width: with one of the two, rich takes 80 columns on a terminal of type dumb."""
MAX_NOTES = 8
"""Notes of one dataset that are printed."""
_node: ContextVar[str] = ContextVar("node", default="")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def console(to_stderr: bool = False, folded: bool = True) -> Console:
    """Return a console on the current stdout or stderr; `folded` wraps lines at the width of a terminal."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    size = (None, None) if folded and stream.isatty() else (COLUMNS, LINES)
    return Console(file=stream, width=size[0], height=size[1], highlight=False, emoji=False)


@contextmanager
def of_node(name: str) -> Iterator[None]:
    """Have each line of this block and thread begin with the name of a node, and each JSON object have it as `node`."""
    token = _node.set(name)
    try:
        yield
    finally:
        _node.reset(token)


def is_of_node() -> bool:
    """Tell whether what is printed now is of one of several nodes."""
    return bool(_node.get())


def _named(text: str) -> str:
    return f"{_node.get()}: {text}" if _node.get() else text


@contextmanager
def written() -> Iterator[None]:
    """Write to stdout in this block, which flushes at its end.

    Raises OutOfSpace where its disk is full, BrokenPipeError where its reader is gone, CacheError for other errors.
    """
    try:
        yield
        print(end="", flush=True)
    except (CacheError, BrokenPipeError):
        raise
    except OSError as error:
        message = f"the output cannot be written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"{message}; free space there") from error
        raise CacheError(message) from error


def say(text: str) -> None:
    """Print one result line for a person. Raises the errors of `written`."""
    with written():
        console().print(_named(text), markup=False, soft_wrap=True)


def complain(error: CacheError, as_json: bool = False) -> None:
    """Print an error as one line on stderr; as JSON, `{"error": its text, "code": its exit code}`."""
    message = " ".join(str(error).split())
    if as_json:
        emit({"error": message, "code": error.code}, to_stderr=True)
        return
    sys.stderr.write(f"cachesvc: {printable(_named(message))}\n")
    sys.stderr.flush()


def emit(row: Mapping[str, Any], to_stderr: bool = False) -> None:
    """Print one JSON object on one line, and flush. Raises the errors of `written`."""
    with nullcontext() if to_stderr else written():
        named = {**row, "node": _node.get()} if _node.get() else row
        print(json.dumps(named), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def report(as_json: bool, text: str, row: Mapping[str, Any]) -> None:
    """Print a result: as JSON the row, else the text."""
    if as_json:
        emit(row)
    else:
        say(text)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]], wide: bool = False) -> None:
    """Print a table with one line a row, of the width of the terminal unless `wide`. Marks of headers: see `Column`.

    Raises the errors of `written`.
    """
    head, *body = lines(headers, rows, None if wide else terminal_columns())
    with written():
        shown = console(folded=False)
        shown.print(head, markup=False, soft_wrap=True, style="bold")
        for line in body:
            shown.print(line, markup=False, soft_wrap=True)


def terminal_columns() -> int | None:
    """Return the width of the terminal; None where the output goes elsewhere. `watch` states the size of its
    terminal in COLUMNS and LINES."""
    if sys.stdout.isatty() or all(os.environ.get(name, "").isdecimal() for name in ("COLUMNS", "LINES")):
        return shutil.get_terminal_size().columns
    return None


def size(count: float) -> str:
    """Format bytes for people: `1.5 GiB`."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count /= 1024
        power += 1
    if count == 1 and power == 0:
        return "1 byte"
    return f"{count:.0f} {_UNITS[0]}" if power == 0 else f"{count:.1f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """Format seconds for people: `1:02:03` or `2:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def short_id(dataset: str, wide: bool = False) -> str:
    """Return as much of a dataset's id as a person needs to name it: 12 digits, unless `wide`."""
    return dataset if wide else dataset[:12]


def is_quiet() -> bool:
    """Tell whether the command line has `-q`."""
    import click

    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get("cachesvc.quiet"))


def plural(count: int, one: str, many: str = "") -> str:
    """Format a count of things: `1 reader`, `2 readers`."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def tier_trouble(tier: pb.TierStatus) -> str:
    """Say what is wrong with a tier; "" where nothing is."""
    if tier.lost:
        return "lost: see the daemon's log"
    return "does not answer" if tier.stalled else "takes no more: see the daemon's log" if tier.full else ""


EPOCH_HEADS = ["epoch>", "touched>", "hits>", "bound>", "of bound>"]


def epoch_cells(epoch: pb.EpochStatus) -> list[str]:
    """Return a row for `EPOCH_HEADS`."""
    shares = (epoch.hit_rate, epoch.bound, epoch.of_bound)
    return [f"{epoch.number}", f"{epoch.touched:,}", *(share(each, 1.0) for each in shares)]


def share(part: float, whole: float) -> str:
    """Format a percentage that is 100 % only where the part is the whole."""
    if whole <= 0:
        return "-"
    percent = 100 * part / whole
    return f"{min(percent, 99.9):.1f} %" if part < whole else "100 %"


def marks(row: pb.DatasetStatus) -> str:
    """Return the marks of a dataset: that it is pinned, and when it was listed if its source has been down since."""
    listed = time.strftime("listed %m-%d %H:%M UTC", time.gmtime(row.listed_at)) if row.listed_at else ""
    return ", ".join(filter(None, ["pinned" if row.pinned else "", listed]))


def print_notes(notes: Sequence[str], as_json: bool) -> None:
    """Print each note of a catalog as a line on stderr: `warning: ...`, or as JSON `{"warning": ...}`."""
    printed = [] if is_quiet() else list(notes[:MAX_NOTES])
    if printed and len(notes) > MAX_NOTES:
        printed.append(f"and {len(notes) - MAX_NOTES:,} notes more, in ds.catalog.notes")
    for note in printed:
        line = " ".join(note.split())
        if as_json:
            emit({"warning": line}, to_stderr=True)
        else:
            sys.stderr.write(f"warning: {printable(_named(line))}\n")
            sys.stderr.flush()


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
