"""Compiles CSV and TSV: the first row of each file names its columns, and all files together have one schema.

A column holds integers if all its cells are, else numbers if all are, else text. An empty cell decides nothing.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain

from cachesvc.catalog.compiler import Draft, Inputs, ListedObject
from cachesvc.catalog.described_data import check_one_table, tables_about
from cachesvc.catalog.formats.text_rows import TextRows, first_lines
from cachesvc.catalog.kinds import extension_of
from cachesvc.catalog.labels.file_tables import SEPARATORS
from cachesvc.catalog.layout import Field
from cachesvc.catalog.row_syntax import CSV, MAX_ROW_BYTES, csv_rows
from cachesvc.core.errors import CorruptData, InvalidInput

_MAX_COLUMNS = 4096
_MAX_HEADERS = 256
_QUOTED = re.compile(r'"[^"]*("|\Z)')
_BAR = "|"
_INTEGER = re.compile(r"-?(0|[1-9]\d{0,18})", re.ASCII)
_NUMBER = re.compile(
    r"[-+]?((0|[1-9]\d*)(\.\d*)?|\.\d+)(e[-+]?\d+)?|[-+]?(inf|infinity|nan)", re.ASCII | re.IGNORECASE
)
_EXACT = 2**53
"""Float64 holds every integer up to here, and so all of `_EXACT_DIGITS`."""
_EXACT_DIGITS = 15


def compile_csv(inputs: Inputs) -> Draft:
    """Find every row, and the types of the columns. Raises CorruptData for a file without a header or with a quote that is
    never closed, InvalidInput for columns of the same name and for files that are not one table, and as `TextRows` does."""
    about, told = tables_about(inputs, partial(_headers, inputs))
    chosen = [at for at in range(len(inputs.entries)) if at not in about]
    rows, columns = TextRows(inputs, chosen), dict[str, _Column]()
    headers: dict[tuple[str, tuple[int, ...]], int] = {}
    notes: list[str] = []
    names_of: dict[int, list[str]] = {}
    for at in chosen:
        entry = inputs.entries[at]
        table, header = _Table(entry.object.uri, rows.lines(at), _separator(inputs, entry)), 0
        if names := table.header():
            names_of[at] = names
            for name in names:
                columns.setdefault(name, _Column(len(columns)))
            mine = [columns[name] for name in names]
            header = headers.setdefault((table.separator, tuple(each.field for each in mine)), len(headers))
            _check_header(entry.object.uri, names, len(columns), len(headers))
            notes = notes or _doubts(entry.object.uri, names)
            _add_rows(rows, at, table, names, mine)
        rows.end_object(at, header)
    check_one_table(inputs, names_of)
    fields = [Field(name, column.kind) for name, column in columns.items()]
    draft = rows.draft(CSV, fields, list(headers))
    draft.notes += [*notes, *told]
    return draft


def _headers(inputs: Inputs, wanted: Sequence[int]) -> dict[int, list[str]]:
    """Return the names of the columns of files, of those alone whose header is short and parses."""
    headers: dict[int, list[str]] = {}
    for at, lines in first_lines(inputs, wanted).items():
        entry = inputs.entries[at]
        table = _Table(entry.object.uri, iter([(0, line) for line in lines]), _separator(inputs, entry))
        with suppress(CorruptData):
            if lines:
                headers[at] = table.header()
    return headers


def _add_rows(
    rows: TextRows, at: int, table: _Table, names: Sequence[str], columns: Sequence[_Column]
) -> None:
    for offset, length, line, cells in table.rows():
        sample = rows.add(offset, length, line)
        if isinstance(cells, str):
            rows.add_malformed(at, line, cells)
        elif len(cells) != len(names):
            rows.add_malformed(at, line, f"has {len(cells)} cells, its header {len(names)}")
        else:
            for column, cell in zip(columns, cells, strict=True):
                column.add(cell)
            rows.tags.add_all(sample, zip(names, cells, strict=True))


def _doubts(uri: str, names: Sequence[str]) -> list[str]:
    """Return the note on a header that may be data."""
    if not any(map(_NUMBER.fullmatch, names)):
        return []
    some = ", ".join(map(repr, names[:4]))
    return [
        f"columns are named {some} by the first line of {uri}: if that is data, put a line of names before it"
    ]


def _separator(inputs: Inputs, entry: ListedObject) -> str:
    """Return what divides the cells of a file, "" where its first line tells."""
    return inputs.options.separator or ("\t" if extension_of(entry.name).startswith("tsv") else "")


class _Table:
    """The rows of one file with their places. Lines are pulled from `lines`, (offset, bytes), as the parser needs them."""

    def __init__(self, uri: str, lines: Iterator[tuple[int, bytes]], separator: str) -> None:
        self._uri, self._lines, self.separator = uri, lines, separator
        self._line = self._begin = self._end = 0
        self._undecoded, self._ended = False, False

    def _text(self) -> Iterator[str]:
        """Yield lines as text. Undecodable bytes are kept in place, so that rows end where they do."""
        for offset, line in self._lines:
            self._line, self._end = self._line + 1, offset + len(line) - line.endswith(b"\r")
            if self._begin < 0:
                self._begin = offset
            if self._end - self._begin > MAX_ROW_BYTES:
                raise CorruptData(
                    f"{self._uri}: the row at byte {self._begin:,} exceeds {MAX_ROW_BYTES >> 20} MiB: close its quotes"
                )
            try:
                yield line.decode() + "\n"
            except UnicodeDecodeError:
                self._undecoded = True
                yield line.decode(errors="surrogateescape") + "\n"
        self._ended = True

    def header(self) -> list[str]:
        """Return the names of the columns, [] for a file without rows. A column without a name is called as pandas does."""
        text = self._text()
        first = next((line for line in text if line.strip()), "")
        if not first:
            return []
        self.separator = self.separator or _separator_of(first)
        self._reader = csv_rows(chain([first], text), self.separator)
        try:
            cells = next(self._reader)
        except csv.Error as error:
            raise CorruptData(f"{self._uri} line {self._line}: its header is no CSV: {error}") from error
        if self._undecoded:
            raise CorruptData(f"{self._uri} is no UTF-8 text: save it as UTF-8")
        return [cell.strip() or f"Unnamed: {number}" for number, cell in enumerate(cells)]

    def rows(self) -> Iterator[tuple[int, int, int, list[str] | str]]:
        """Yield offset, length, first line and cells of every row that is not blank; or why it does not parse."""
        while True:
            line = self._line + 1
            self._begin, self._undecoded = -1, False
            row: list[str] | str
            try:
                row = next(self._reader)
            except StopIteration:
                return
            except csv.Error as error:
                if self._ended:
                    raise CorruptData(
                        f"{self._uri} line {line}: a quote is opened and never closed"
                    ) from error
                row = f"is no CSV: {error}"
            if row:
                why = "is no UTF-8 text" if self._undecoded else row
                yield self._begin, self._end - self._begin, line, why


def _separator_of(header: str) -> str:
    """Return the most frequent separator outside the quotes of a line. A bar, which names may hold, comes last."""
    bare = _QUOTED.sub("", header)
    separator = max(SEPARATORS, key=bare.count)
    return separator if separator in bare or _BAR not in bare else _BAR


def _check_header(uri: str, names: Sequence[str], columns: int, headers: int) -> None:
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InvalidInput(f"{uri} has two columns called {twice!r}: rename one")
    if columns > _MAX_COLUMNS or headers > _MAX_HEADERS:
        raise InvalidInput(
            f"{uri}: more than {_MAX_COLUMNS:,} columns, or {_MAX_HEADERS} different headers, in all files: open fewer at "
            "once, or write them as Parquet"
        )


class _Column:
    """The type of a column, by the cells seen so far. `field`: its index among the fields."""

    def __init__(self, field: int) -> None:
        self.field = field
        self._all_integers = self._all_numbers = True
        self._exact = True
        self._seen = False

    @property
    def kind(self) -> str:
        """Return "int", "float" or "text". Integers that float64 does not hold make text of a column of numbers."""
        if not self._seen or not self._all_numbers:
            return "text"
        return "int" if self._all_integers else "float" if self._exact else "text"

    def add(self, cell: str) -> None:
        """Take one more cell into account."""
        if not self._all_numbers or not (cell := cell.strip()):
            return
        self._seen = True
        if _INTEGER.fullmatch(cell):
            value = abs(int(cell))
            self._exact = self._exact and value <= _EXACT
            self._all_integers = self._all_integers and value < 2**63
        else:
            self._all_integers = False
            self._all_numbers = _NUMBER.fullmatch(cell) is not None
            self._exact = self._exact and (len(cell) <= _EXACT_DIGITS or not cell.lstrip("+-").isdigit())
