"""Tables about files: CSV (with `,`, `;` or tabs), whose first line names the columns, and JSONL."""

from __future__ import annotations

import csv
import io
import json
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from cachesvc.core.errors import CorruptData, InvalidInput

FILE_COLUMNS = ("file_name", "filename", "path", "image_path", "file", "image", "key")
"""Names of the column of files, in order of preference, in upper or lower case."""
LABEL_COLUMNS = ("label", "class", "cls", "target")
SEPARATORS = (",", ";", "\t")
_HEADER_CHARS = 64 << 10
_HEADER_ROWS = 100
"""Rows of JSONL whose keys are taken for its columns: the first ones may lack a label."""
_SHOWN_CHARS = 200
_CELL_CHARS = 128 << 10
_LINE_CHARS = 1 << 20
"""Limit of a line of JSONL: parsed, brackets take 27 times as much memory."""


@dataclass(frozen=True, slots=True)
class FileTable:
    """A table and its columns. `separator`: "" for JSONL."""

    uri: str
    text: str
    separator: str
    columns: tuple[str, ...]

    @property
    def file(self) -> str | None:
        """The column of files, None for none."""
        return _first(self.columns, FILE_COLUMNS)

    @property
    def label(self) -> str | None:
        """The column of labels, None for none."""
        return _first(self.columns, LABEL_COLUMNS)

    def check_labels(self) -> None:
        """Raise InvalidInput, naming the columns, unless files and labels have one each."""
        if self.file is None or self.label is None:
            found = ", ".join(map(repr, self.columns))[:_SHOWN_CHARS] or "nothing"
            raise InvalidInput(
                f"{self.uri} has the columns {found}: it must name one for the file "
                f"({', '.join(FILE_COLUMNS)}) and one for the label ({', '.join(LABEL_COLUMNS)})"
            )

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (file, other columns), the label's renamed to `label`. Raises CorruptData for a row that does not parse."""
        file, label = self.file, self.label
        for row in _separated(self) if self.separator else _json_rows(self.uri, self.text):
            rest = {name: value for name, value in row.items() if name not in (file, label)}
            if label is not None:
                rest["label"] = row.get(label)
            yield str(row.get(file or "", "")).strip(), rest


def parse_table(uri: str, body: bytes) -> FileTable:
    """Parse a table by the extension of its name: JSONL, else separated values.

    Raises CorruptData for a file that is not UTF-8 text, and for a first line that does not parse.
    """
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise CorruptData(
            f"{uri} is no UTF-8 text ({error.reason} at byte {error.start}): save it as UTF-8"
        ) from error
    if uri.lower().endswith((".jsonl", ".ndjson", ".json")):
        rows = islice(_json_rows(uri, text), _HEADER_ROWS)
        return FileTable(uri, text, "", tuple(dict.fromkeys(name for row in rows for name in row)))
    headers = {separator: _header(uri, text, separator) for separator in SEPARATORS}
    fitting = [separator for separator, header in headers.items() if _first(header, FILE_COLUMNS) is not None]
    # Not `csv.Sniffer`: it goes by frequencies, and takes a letter for the separator of a table of one column.
    chosen = fitting[0] if fitting else max(headers, key=lambda separator: len(headers[separator]))
    return FileTable(uri, text, chosen, headers[chosen])


def begins_as_table(beginning: bytes) -> bool:
    """Tell whether a file begins as a JSONL table: with a complete line that is a JSON object and names a file."""
    line, end, _ = beginning.removeprefix(BOM_UTF8).lstrip().partition(b"\n")
    try:
        row = json.loads(line) if end else None
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict):
        return False
    file = _first(tuple(row), FILE_COLUMNS)
    return file is not None and isinstance(row[file], str)


def begins_as_json_lines(beginning: bytes) -> bool:
    """Tell whether a file begins with a line that is a JSON object, followed by another object."""
    line, _, rest = beginning.removeprefix(BOM_UTF8).lstrip().partition(b"\n")
    try:
        return isinstance(json.loads(line), dict) and rest.lstrip().startswith(b"{")
    except (ValueError, RecursionError):
        return False


def _first(columns: Sequence[str], wanted: Sequence[str]) -> str | None:
    spelled = {column.lower(): column for column in reversed(columns)}
    return next((spelled[name] for name in wanted if name in spelled), None)


def _lines(uri: str, text: str, separator: str) -> Iterator[list[str]]:
    """Yield the lines that are not empty, as stripped cells.

    Raises CorruptData where a quote is still open at the end: it may have swallowed half of the table.
    """
    end, ended, before = ["", "end"], False, 0

    def marked() -> Iterator[str]:
        nonlocal ended
        yield from io.StringIO(text, newline="")
        ended = True
        yield separator.join(end)

    reader = csv.reader(marked(), delimiter=separator, skipinitialspace=True)
    try:
        for cells in reader:
            if ended and cells == end:
                return
            if ended:
                raise CorruptData(f"{uri} line {before + 1}: a quote is opened and never closed")
            before = reader.line_num
            if any(len(cell) > _CELL_CHARS for cell in cells):
                raise CorruptData(f"{uri} line {before}: field larger than {_CELL_CHARS:,} characters")
            if cells:
                yield [cell.strip() for cell in cells]
    except csv.Error as error:
        raise CorruptData(f"{uri} line {reader.line_num}: {error}") from error


def _header(uri: str, text: str, separator: str) -> tuple[str, ...]:
    return tuple(next(_lines(uri, text[:_HEADER_CHARS], separator), []))


def _separated(table: FileTable) -> Iterator[Mapping[str, Any]]:
    lines = _lines(table.uri, table.text, table.separator)
    next(lines, None)
    return (dict(zip(table.columns, cells, strict=False)) for cells in lines)


def _json_rows(uri: str, text: str) -> Iterator[Mapping[str, Any]]:
    # Not splitlines: JSON texts may hold other line separators.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        if len(line) > _LINE_CHARS:
            raise CorruptData(
                f"{uri} line {number} has {len(line):,} characters, more than any row of labels"
            )
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CorruptData(f"{uri} line {number} is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise CorruptData(f"{uri} line {number} is no JSON object: JSONL holds one a line")
        yield row
