"""How results look: rich for people, JSON for programs, and nothing of one in the other."""

from __future__ import annotations

import errno
import json
import sys
from collections.abc import Iterator, Mapping, MutableSequence, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

from rich.console import Console
from rich.table import Table

from cachesvc.core.errors import CacheError, OutOfSpace
from cachesvc.core.safe_text import printable

COLUMNS = 1000
"""Width of what is never folded: a table, and all that no terminal shows. Lines are cut by whoever shows them."""
LINES = 25
"""Both must be given, or rich takes 80 columns for a terminal that calls itself dumb."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def console(to_stderr: bool = False, folded: bool = True) -> Console:
    """A console on stdout or stderr as they are now; a terminal's lines are folded to its width, or left to it."""
    stream = sys.stderr if to_stderr else sys.stdout
    size = (None, None) if folded and stream.isatty() else (COLUMNS, LINES)
    return Console(file=stream, width=size[0], height=size[1], highlight=False, emoji=False)


@contextmanager
def written() -> Iterator[None]:
    """Around what goes to stdout. Raises OutOfSpace where its disk is full, CacheError where it cannot be written for
    other reasons, BrokenPipeError where nobody reads it any more."""
    try:
        yield
        print(end="", flush=True)
    except (CacheError, BrokenPipeError):
        raise
    except OSError as error:
        said = f"the output cannot be written: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfSpace(f"{said}; free space there") from error
        raise CacheError(said) from error


def say(text: str) -> None:
    """One result line for a person. Raises as `written`."""
    with written():
        console().print(text, markup=False, soft_wrap=True)


def complain(error: CacheError, as_json: bool = False) -> None:
    """An error's one line on stderr; as JSON, `{"error": its text, "code": its exit code}`."""
    said = " ".join(str(error).split())
    if as_json:
        emit({"error": said, "code": error.code}, to_stderr=True)
        return
    sys.stderr.write(f"cachesvc: {printable(said)}\n")
    sys.stderr.flush()


def emit(row: Mapping[str, Any], to_stderr: bool = False) -> None:
    """One JSON object on one line, flushed: programs read as it happens. Raises as `written`."""
    with nullcontext() if to_stderr else written():
        print(json.dumps(row), file=sys.stderr if to_stderr else sys.stdout, flush=True)


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A plain table, a line a row however narrow the terminal; headers that end in `>` are right-aligned. Raises as
    `written`."""
    drawn = Table(box=None, header_style="bold", pad_edge=False)
    for header in headers:
        right = header.endswith(">")
        drawn.add_column(header.rstrip(">"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*row)
    with written():
        console(folded=False).print(drawn, markup=False)


def size(count: float) -> str:
    """Bytes for people: `1.5 GiB`."""
    power = 0
    while count >= 1024 and power < len(_UNITS) - 1:
        count /= 1024
        power += 1
    return f"{count:.0f} {_UNITS[0]}" if power == 0 else f"{count:.1f} {_UNITS[power]}"


def duration(seconds: float) -> str:
    """Seconds for people: `1:02:03` or `2:03`."""
    minutes, rest = divmod(max(0, round(seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def share(part: float, whole: float) -> str:
    """A percentage that says 100 % only for all of it."""
    if whole <= 0:
        return "-"
    percent = 100 * part / whole
    return f"{min(percent, 99.9):.1f} %" if part < whole else "100 %"


def plain(message: Any) -> dict[str, Any]:
    """A protobuf message as JSON-able data, every field present, integers as integers (unlike proto JSON)."""
    return {field.name: _plain_value(getattr(message, field.name)) for field in message.DESCRIPTOR.fields}


def _plain_value(value: Any) -> Any:
    if hasattr(value, "DESCRIPTOR"):  # a message; its class is not imported for every verb
        return plain(value)
    if isinstance(value, MutableSequence):
        return [_plain_value(item) for item in value]
    return value
