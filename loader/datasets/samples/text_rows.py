"""Rows of text and of TFRecord, parsed to samples: JSON, CSV, plain lines and Examples, as the catalog's `row_syntax` has
them."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from cachesvc.catalog.layout import Rows
from cachesvc.catalog.parsing.tf_example import BYTES, features_of
from cachesvc.catalog.row_syntax import CSV, EXAMPLE, JSON, RECORD, TEXT, CsvHeader, csv_rows, json_value
from cachesvc.core.errors import CorruptData
from loader.datasets.generators import RngKey
from loader.datasets.plain_values import Empty, plain_column
from loader.datasets.samples.sample_form import ColumnBatches, SampleForm
from loader.reading.reader import ExtentReader, Ints

_LIST = "[]"
"""Ends the encoding of a feature that has several values."""
_NUMBERS: dict[str, Callable[[str], int | float]] = {"int": int, "float": float}


class TextRowSamples:
    """Samples of rows of one catalog: dicts, or tuples of `fields`; lines of plain text are str."""

    def __init__(self, form: SampleForm) -> None:
        self._form, spec, self._catalog = form, form.spec, form.catalog
        assert isinstance(form.catalog.layout, Rows), "only rows have a syntax"
        self._syntax, self._headers = form.catalog.layout.syntax, form.catalog.csv_headers
        self._names = [field.name for field in form.catalog.fields]
        self._encodings = {field.name: field.encoding for field in form.catalog.fields}
        self._fields = None if spec.fields is None else form.stored
        self._wanted = self._names if self._fields is None else self._fields
        several = len(form.names) > 1 if spec.fields is None else not spec.bare
        plain = form.is_plain and spec.decode == "auto" and several
        self._has_columns = plain and self._syntax == CSV
        self.sample_kind = form.kind if spec.bare else self._kind()
        self.places = form.places

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """See `SampleReader`."""
        parsed = self._parsed(samples, self._read(reader, samples))
        if self._fields is None:
            return self._form.finished(parsed, samples, rng_key)
        return self._form.samples(parsed, samples, rng_key)

    def gather(self, collate: Callable[..., Any]) -> ColumnBatches | None:
        """See `SampleReader`."""
        if not self._has_columns or collate is not default_collate:
            return None
        return ColumnBatches(self._form, self._batch_columns, self.iter_samples)

    def _kind(self) -> str:
        """The kind of a sample, in words. JSON rows may have any keys."""
        if self._fields is not None:
            return f"a tuple of {', '.join(self._fields)}"
        whole = {JSON: "a value of JSON", TEXT: "text", RECORD: "bytes"}
        return whole.get(self._syntax, f"a dict of {', '.join(self._names)}")

    def _read(self, reader: ExtentReader, samples: Ints) -> list[bytes]:
        addresses, lengths = self._form.places(samples)
        return [row or b"" for row in reader.read(addresses[:, 0], lengths[:, 0])]

    def _batch_columns(self, reader: ExtentReader, samples: Ints, empty: Empty | None) -> list[Any] | None:
        found = [plain_column(each, empty) for each in self._columns(samples, self._read(reader, samples))]
        return None if any(each is None for each in found) else found

    def _parsed(self, samples: Ints, rows: Sequence[bytes]) -> Iterator[Any]:
        """Yield samples. Raises CorruptData for a row that does not parse, naming file and line."""
        if self._fields is not None and not self._fields:
            yield from [()] * len(rows)
            return
        parse = {JSON: self._json, EXAMPLE: self._example, TEXT: self._line}.get(self._syntax)
        if parse is not None:
            yield from (parse(*each) for each in zip(samples.tolist(), rows, strict=True))
        elif self._syntax == RECORD:
            yield from rows if self._fields is None else ((row,) * len(self._fields) for row in rows)
        else:
            yield from map(self._shaped, zip(*self._columns(samples, rows), strict=True))

    def _shaped(self, values: Sequence[Any]) -> dict[str, Any] | tuple[Any, ...]:
        return dict(zip(self._wanted, values, strict=True)) if self._fields is None else tuple(values)

    def _line(self, sample: int, row: bytes) -> str | tuple[str, ...]:
        text = self._text(sample, row)
        return text if self._fields is None else (text,) * len(self._fields)

    def _json(self, sample: int, row: bytes) -> Any:
        try:
            value = json_value(row)
        except ValueError as error:
            raise self._malformed(sample, f"is no JSON: {error}") from error
        if self._fields is None:
            return value
        if not isinstance(value, dict):
            raise self._malformed(sample, f"is {type(value).__name__} and no object, which fields= needs")
        return tuple(value.get(name) for name in self._fields)

    def _example(self, sample: int, row: bytes) -> dict[str, Any] | tuple[Any, ...]:
        """Decode a `tf.train.Example`. Values are bytes, int and float; several are list[bytes], int64[n] and float32[n].
        A feature that a sample lacks is None, or empty."""
        try:
            features = features_of(row)
            return self._shaped(
                [_value(name, self._encodings[name], *features.get(name, ("", ()))) for name in self._wanted]
            )
        except ValueError as error:
            uri, record = self._catalog.line_of(sample)
            raise CorruptData(
                f"{uri} record {record}: {error}; write it anew, or leave it out by on_error='skip'"
            ) from error

    def _text(self, sample: int, row: bytes) -> str:
        try:
            return row.decode()
        except UnicodeDecodeError as error:
            raise self._malformed(sample, f"is no UTF-8 text: {error}") from error

    def _columns(self, samples: Ints, rows: Sequence[bytes]) -> list[Sequence[Any]]:
        """Parse the rows of each header together, to a column for each field. Raises as `_parsed`."""
        texts = self._texts(samples, rows)
        headers = self._catalog.headers_of(samples)
        if len(headers) and (headers == headers[0]).all():
            return self._csv_part(int(headers[0]), samples, texts)
        width = len(self._wanted)
        columns: list[list[Any]] = [[None] * len(texts) for _ in range(width)]
        for number in np.unique(headers).tolist():
            where = np.flatnonzero(headers == number)
            part = self._csv_part(number, samples[where], [texts[at] for at in where.tolist()])
            for into, column in zip(columns, part, strict=True):
                for at, value in zip(where.tolist(), column, strict=True):
                    into[at] = value
        return [*columns]

    def _csv_part(self, number: int, samples: Ints, texts: Sequence[str]) -> list[Sequence[Any]]:
        """Parse rows of one header. A field that it does not name is None."""
        header = self._headers[number]
        cells = zip(*self._cells(header, samples, texts), strict=True)
        stored = {
            self._names[field]: (field, column) for field, column in zip(header.fields, cells, strict=True)
        }
        return [
            self._values(*stored[name]) if name in stored else [None] * len(texts) for name in self._wanted
        ]

    def _texts(self, samples: Ints, rows: Sequence[bytes]) -> list[str]:
        try:
            return [row.decode() for row in rows]
        except UnicodeDecodeError:
            return [self._text(sample, row) for sample, row in zip(samples.tolist(), rows, strict=True)]

    def _cells(self, header: CsvHeader, samples: Ints, texts: Sequence[str]) -> list[list[str]]:
        width = len(header.fields)
        try:
            cells = list(csv_rows(texts, header.separator))
            if len(cells) == len(texts) and set(map(len, cells)) <= {width}:
                return cells
        except csv.Error:
            pass
        pairs = zip(samples.tolist(), texts, strict=True)
        return [self._row(header, sample, text) for sample, text in pairs]  # one of them raises

    def _row(self, header: CsvHeader, sample: int, text: str) -> list[str]:
        try:
            cells = next(csv_rows([text], header.separator))
        except csv.Error as error:
            raise self._malformed(sample, f"is no CSV: {error}") from error
        if len(cells) != len(header.fields):
            raise self._malformed(sample, f"has {len(cells)} cells, its header {len(header.fields)}")
        return cells

    def _values(self, field: int, cells: Sequence[str]) -> Sequence[Any]:
        """Convert the cells of a column. An empty cell is None among numbers."""
        number = _NUMBERS.get(self._catalog.fields[field].encoding)
        if number is None:
            return cells
        try:
            return [number(cell) for cell in cells]
        except ValueError:
            return [number(cell) if cell.strip() else None for cell in cells]

    def _malformed(self, sample: int, why: str) -> CorruptData:
        uri, line = self._catalog.line_of(sample)
        return CorruptData(f"{uri} line {line} {why}; repair it, or leave it out by on_error='skip'")


def _value(name: str, encoding: str, kind: str, values: Any) -> Any:
    wanted = encoding.removesuffix(_LIST)
    if kind not in ("", wanted):
        raise ValueError(f"feature {name!r} is {kind}, and {wanted} in the catalog")
    if encoding != wanted:
        return list(values) if wanted == BYTES else np.array(values, wanted)
    if len(values) > 1:
        raise ValueError(f"feature {name!r} has {len(values)} values, and one in the catalog")
    return values[0] if values else None
