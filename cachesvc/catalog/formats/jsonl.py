"""Compiles JSON lines: a sample is the value of one line, and each may have other keys."""

from __future__ import annotations

from collections.abc import Sequence

from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.containers import one_a_line
from cachesvc.catalog.formats.text_rows import TextRows
from cachesvc.catalog.kinds import kind_of
from cachesvc.catalog.layout import Field
from cachesvc.catalog.row_syntax import JSON, json_value
from cachesvc.core.errors import InvalidInput

_MAX_FIELDS = 1024
"""Limit of the names that `fields=` can choose; a row may have others."""
_MAX_NAME_CHARS = 1024


def select(entries: Sequence[ListedObject]) -> list[ListedObject]:
    """Choose the files of JSON lines by their names; without one, the `.json` files."""
    found = [entry for entry in entries if kind_of(entry.name) == "jsonl"]
    return found or [entry for entry in entries if entry.extension == "json"]


def compile_jsonl(inputs: Inputs) -> Draft:
    """Find every line that is not blank. Raises CorruptData for a file without JSON, InvalidInput for one that is a list,
    and as `TextRows` does."""
    rows, names = TextRows(inputs), dict[str, None]()
    beyond = False
    for at, entry in enumerate(inputs.entries):
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
                if not value.keys() <= names.keys():
                    beyond = not _add_names(names, value) or beyond
        if len(rows) == before + 1 and isinstance(value, list) and value and isinstance(value[0], dict):
            raise InvalidInput(f"{entry.object.uri} is one JSON list: {one_a_line()}")
        rows.end_object(at)
    draft = rows.draft(JSON, [Field(name, JSON) for name in names])
    if beyond:
        draft.notes.append(
            f"fields= can name the first {_MAX_FIELDS:,} keys of the data only; samples have all"
        )
    return draft


def _add_names(names: dict[str, None], more: dict[str, object]) -> bool:
    """Add the keys of a row; False where the limit leaves some out."""
    for name in more:
        if len(names) >= _MAX_FIELDS or len(name) > _MAX_NAME_CHARS:
            return False
        names[name] = None
    return True
