"""Prints a catalog's notes: the data that was left out or not understood."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cachesvc.cli import output
from cachesvc.core.safe_text import printable

MAX_PRINTED = 8
"""Number of notes of one dataset that are printed."""


def print_notes(notes: Sequence[str], as_json: bool) -> None:
    """Print each note as a line on stderr: `warning: ...`, or as JSON `{"warning": ...}`."""
    printed = list(notes[:MAX_PRINTED])
    if len(notes) > MAX_PRINTED:
        printed.append(f"and {len(notes) - MAX_PRINTED:,} notes more, in ds.catalog.notes")
    for note in printed:
        line = " ".join(note.split())
        if as_json:
            output.emit({"warning": line}, to_stderr=True)
        else:
            sys.stderr.write(f"warning: {printable(line)}\n")
            sys.stderr.flush()
