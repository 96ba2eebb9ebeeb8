"""Compiles plain text: a sample is a line without its line end, blank ones too; or a whole file."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.formats.text_rows import TextRows
from cachesvc.catalog.kinds import PLAIN, extension_of, kind_of
from cachesvc.catalog.layout import Field
from cachesvc.catalog.row_syntax import TEXT

_EXTENSIONS = ("txt", "text")


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the text files by their names; without one, all files that are not beside the data."""
    plain = [entry for entry in entries if kind_of(entry.name) == PLAIN]
    return [entry for entry in plain if extension_of(entry.name).partition(".")[0] in _EXTENSIONS] or plain


def compile_text(inputs: Inputs) -> Draft:
    """Find every line. Raises as `TextRows` does."""
    rows = TextRows(inputs)
    for at in range(len(inputs.entries)):
        for number, (offset, line) in enumerate(rows.lines(at), 1):
            rows.add(offset, len(line) - line.endswith(b"\r"), number)
        rows.end_object(at)
    return rows.draft(TEXT, [Field("text", TEXT)])


def compile_documents(inputs: Inputs) -> Draft:
    """Find every file that is not empty. Raises as `TextRows` does."""
    rows = TextRows(inputs)
    for at in range(len(inputs.entries)):
        begin, length = rows.document(at)
        if length:
            rows.add(begin, length, 1)
        rows.end_object(at)
    return rows.draft(TEXT, [Field("text", TEXT)])
