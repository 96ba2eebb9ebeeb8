"""Prints results: text and tables for people, JSON for programs, and never both in one."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from cachesvc.cli import layout
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
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def console(to_stderr: bool = False, folded: bool = True) -> Console:
    """Return a console on the current stdout or stderr; `folded` wraps lines at the width of a terminal."""
    from rich.console import Console

    stream = sys.stderr if to_stderr else sys.stdout
    size = (None, None) if folded and stream.isatty() else (COLUMNS, LINES)
    return Console(file=stream, width=size[0], height=size[1], highlight=False, emoji=False)


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
        console().print(text, markup=False, soft_wrap=True)


def complain(error: CacheError, as_json: bool = False) -> None:
    """Print an error as one line on stderr; as JSON, `{"error": its text, "code": its exit code}`."""
    message = " ".join(str(error).split())
    if as_json:
        emit({"error": message, "code": error.code}, to_stderr=True)
        return
    sys.stderr.write(f"cachesvc: {printable(message)}\n")
    sys.stderr.flush()


def emit(row: Mapping[str, Any], to_stderr: bool = False) -> None:
    """Print one JSON object on one line, and flush. Raises the errors of `written`."""
    with nullcontext() if to_stderr else written():
        print(json.dumps(row), file=sys.stderr if to_stderr else sys.stdout, flush=True)


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
    head, *body = layout.lines(headers, rows, None if wide else terminal_columns())
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
            sys.stderr.write(f"warning: {printable(line)}\n")
            sys.stderr.flush()
