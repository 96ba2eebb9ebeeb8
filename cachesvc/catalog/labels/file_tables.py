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

from cachesvc.catalog.options import LabelSource, columns_advice
from cachesvc.core.errors import CorruptData, InvalidInput

FILE_COLUMNS = (
    *(
        "file_name",
        "filename",
        "file_path",
        "filepath",
        "path",
        "image_path",
        "img_path",
        "image_name",
        "img_name",
    ),
    *("image_file", "file", "image", "img", "image_id", "img_id", "key", "__key__", "id"),
)
"""Names of the column of files, in order of preference, in upper or lower case."""
UNSURE_COLUMNS = ("id",)
"""Those of `FILE_COLUMNS` that tables of other things have too: the values decide."""
LABEL_COLUMNS = (
    *("label", "labels", "class", "cls", "target", "targets", "class_name", "label_name", "category"),
    *("class_id", "label_id", "category_id", "y"),
)
"""Names of the column of labels, in order of preference, in upper or lower case."""
SEPARATORS = (",", ";", "\t")
USUAL_NAMES = "file_name and label, for example"
_HEADER_CHARS = 64 << 10
_HEADER_ROWS = 100
"""Rows of JSONL whose keys are taken for its columns: the first ones may lack a label."""
_SHOWN_CHARS = 200
_CELL_CHARS = 128 << 10
_LINE_CHARS = 1 << 20
"""Limit of a line of JSONL: parsed, brackets take 27 times as much memory."""


@dataclass(frozen=True, slots=True)
class FileTable:
    """A table and its columns. `separator`: "" for JSONL. `source` may name columns."""

    uri: str
    text: str
    separator: str
    columns: tuple[str, ...]
    source: LabelSource

    @property
    def file(self) -> str | None:
        """The column of files, None for none."""
        if self.source.file:
            return self.source.file if self.source.file in self.columns else None
        return _first(self.columns, FILE_COLUMNS)

    @property
    def labels(self) -> tuple[str, ...]:
        """The columns of labels, () for none."""
        wanted = self.source.targets
        if wanted:
            return wanted if set(wanted) <= set(self.columns) else ()
        usual = _first([name for name in self.columns if name != self.file], LABEL_COLUMNS)
        return () if usual is None else (usual,)

    def check_labels(self) -> None:
        """Raise InvalidInput, naming the columns, unless files and labels have one each."""
        if self.file is None or not self.labels:
            raise InvalidInput(
                f"{self.described()}: none is known as the {'file' if self.file is None else 'label'}. Write "
                f"{self.advice()}, or use a usual name ({USUAL_NAMES})"
            )

    def described(self) -> str:
        """Return a clause that names the table and its columns."""
        return f"{self.uri} has the columns {', '.join(map(repr, self.columns))[:_SHOWN_CHARS] or 'nothing'}"

    def advice(self, file: str | None = None) -> str:
        """Return the words that name this table's columns, or the first ones in their place."""
        return columns_advice(self.columns, file or self.file, next(iter(self.labels), None))

    def rows(self) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield (file, other columns), the label's renamed to `label`: for several, a list of their values.

        Raises CorruptData for a row that does not parse.
        """
        file, labels = self.file, self.labels
        taken = (file, *labels) if len(labels) == 1 else (file,)
        for row in self.raw_rows():
            rest = {name: value for name, value in row.items() if name not in taken}
            if labels:
                rest["label"] = self._label([row.get(name) for name in labels])
            yield str(row.get(file or "", "")).strip(), rest

    def raw_rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows by column. Raises CorruptData for a row that does not parse."""
        return _separated(self) if self.separator else _json_rows(self.uri, self.text)

    def _label(self, values: Sequence[Any]) -> Any:
        if len(values) > 1:
            return values
        (value,) = values
        if self.source.separator and isinstance(value, str):
            return [part for each in value.split(self.source.separator) if (part := each.strip())]
        return value


def parse_table(uri: str, body: bytes, source: LabelSource) -> FileTable:
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
        columns = tuple(dict.fromkeys(name for row in rows for name in row))
        return FileTable(uri, text, "", columns, source)
    headers = {separator: _header(uri, text, separator) for separator in SEPARATORS}
    wanted = (source.file.lower(),) if source.file else FILE_COLUMNS
    fitting = [separator for separator, header in headers.items() if _first(header, wanted) is not None]
    # Not `csv.Sniffer`: it goes by frequencies, and takes a letter for the separator of a table of one column.
    chosen = fitting[0] if fitting else max(headers, key=lambda separator: len(headers[separator]))
    return FileTable(uri, text, chosen, headers[chosen], source)


def begins_as_table(beginning: bytes) -> bool:
    """Tell whether a file begins as a JSONL table: with a complete line that is a JSON object and names a file."""
    line, end, _ = beginning.removeprefix(BOM_UTF8).lstrip().partition(b"\n")
    try:
        row = json.loads(line) if end else None
    except (ValueError, RecursionError):
        return False
    if not isinstance(row, dict):
        return False
    file = _first(tuple(row), [name for name in FILE_COLUMNS if name not in UNSURE_COLUMNS])
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
