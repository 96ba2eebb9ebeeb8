"""What a catalog says was left out or not understood, to whoever opens its dataset."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cachesvc.cli import output
from cachesvc.core.safe_text import printable

SAID = 8
"""Notes of one dataset that are printed one by one."""


def say_notes(notes: Sequence[str], as_json: bool) -> None:
    """One line each on stderr: `warning: ...`, or as JSON `{"warning": ...}`."""
    said = list(notes[:SAID])
    if len(notes) > SAID:
        said.append(f"and {len(notes) - SAID:,} notes more, in ds.catalog.notes")
    for note in said:
        line = " ".join(note.split())
        if as_json:
            output.emit({"warning": line}, to_stderr=True)
        else:
            sys.stderr.write(f"warning: {printable(line)}\n")
            sys.stderr.flush()
