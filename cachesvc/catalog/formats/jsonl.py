"""Compiles JSON lines: a sample is the value of one line, and each may have other keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial

from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.containers import one_a_line
from cachesvc.catalog.described_data import check_one_table, tables_about
from cachesvc.catalog.formats.text_rows import TextRows, first_lines
from cachesvc.catalog.kinds import kind_of
from cachesvc.catalog.layout import Field
from cachesvc.catalog.row_syntax import JSON, json_value
from cachesvc.core.errors import InvalidInput

_MAX_FIELDS = 1024
"""Limit of the names that `fields=` can choose; a row may have others."""
_MAX_NAME_CHARS = 1024
_ROWS_COMPARED = 20
"""Rows of a file that show whether it describes the data."""


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the files of JSON lines by their names; without one, the `.json` files."""
    lines = [entry for entry in entries if kind_of(entry.name) == "jsonl"]
    return lines or [entry for entry in entries if entry.extension == "json"]


def compile_jsonl(inputs: Inputs) -> Draft:
    """Find every line that is not blank. Raises CorruptData for a file without JSON, InvalidInput for one that is a list
    and for files that are not one table, and as `TextRows` does."""
    about, notes = tables_about(inputs, partial(_first_keys, inputs))
    chosen = [at for at in range(len(inputs.entries)) if at not in about]
    rows, names, beyond = TextRows(inputs, chosen), dict[str, None](), False
    columns: dict[int, dict[str, None]] = {}
    for at in chosen:
        entry, mine = inputs.entries[at], columns.setdefault(at, {})
        before, value = len(rows), None
        for number, (offset, line) in enumerate(rows.lines(at), 1):
            if not line or line.isspace():
                continue
            sample = rows.add(offset, len(line) - line.endswith(b"\r"), number)
            try:
                value = json_value(line)
            except ValueError as error:
                rows.add_malformed(at, number, f"is no JSON: {error}")
                continue
            if isinstance(value, dict):
                rows.tags.add_all(sample, value.items())
                if not value.keys() <= mine.keys():
                    beyond = not _add_names(mine, value) or beyond
        if len(rows) == before + 1 and isinstance(value, list) and value and isinstance(value[0], dict):
            raise InvalidInput(f"{entry.object.uri} is one JSON list: {one_a_line()}")
        rows.end_object(at)
        beyond = not _add_names(names, mine) or beyond
    check_one_table(inputs, columns)
    draft = rows.draft(JSON, [Field(name, JSON) for name in names])
    draft.notes += notes
    if beyond:
        draft.notes.append(
            f"fields= can name the first {_MAX_FIELDS:,} keys of the data only; samples have all"
        )
    return draft


def _first_keys(inputs: Inputs, wanted: Sequence[int]) -> dict[int, set[str]]:
    """Return the keys of the first rows of files, of those alone whose first line is whole."""
    keys: dict[int, set[str]] = {}
    for at, lines in first_lines(inputs, wanted).items():
        rows = []
        with suppress(ValueError):
            rows += [json_value(line) for line in lines[:_ROWS_COMPARED] if line.strip()]
        if lines:
            keys[at] = {name for row in rows if isinstance(row, dict) for name in row}
    return keys


def _add_names(names: dict[str, None], more: Iterable[str]) -> bool:
    """Add the keys of a row; False where the limit leaves some out."""
    for name in more:
        if len(names) >= _MAX_FIELDS or len(name) > _MAX_NAME_CHARS:
            return False
        names[name] = None
    return True
