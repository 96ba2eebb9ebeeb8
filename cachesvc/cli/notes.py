"""What a catalog says was left out or not understood, to whoever opens its dataset."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cachesvc.cli import output
from cachesvc.client import Control
from cachesvc.core.model import DatasetId
from cachesvc.leases import DaemonGrants

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
            sys.stderr.write(f"warning: {line}\n")
            sys.stderr.flush()


def say_notes_of(control: Control, dataset: DatasetId, as_json: bool) -> None:
    """The notes of a dataset that the daemon has open. Raises what the daemon refuses its catalog with."""
    from cachesvc.catalog.catalog import Catalog

    grants = DaemonGrants(control.directory, dataset)
    try:
        fd = grants.catalog()
        try:
            notes = Catalog.open(f"/proc/self/fd/{fd}").notes
        finally:
            os.close(fd)
    finally:
        grants.close()
    say_notes(notes, as_json)
