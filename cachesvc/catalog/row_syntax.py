"""Parses one row: a line of JSON, a row of CSV, a line of plain text. Compilers and loaders share it.

A row of the syntax `EXAMPLE` is a `tf.train.Example` (`parsing/tf_example.py`), and one of `RECORD` is bytes.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

JSON, CSV, TEXT, EXAMPLE, RECORD = SYNTAXES = ("json", "csv", "text", "example", "record")
MAX_ROW_BYTES = 64 << 20
"""Limit of a row: a parsed one takes up to 27 times as much memory."""


@dataclass(frozen=True, slots=True)
class CsvHeader:
    """The first row of a CSV file: `fields` are the indices of the fields that its cells name."""

    separator: str
    fields: tuple[int, ...]


_decode = msgspec.json.Decoder().decode


def json_value(row: bytes) -> Any:
    """Return what `json.loads` gives for a line. Raises ValueError for anything else than JSON in UTF-8."""
    try:
        return _decode(row)
    except (msgspec.MsgspecError, ValueError, RecursionError):  # NaN, 1e400 and lone surrogates among others
        return _loads(row.decode())


def _loads(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"{error.msg} at character {error.pos + 1}") from None
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def csv_rows(lines: Iterable[str], separator: str) -> Iterator[list[str]]:
    """Return the cells of rows, quoted as in RFC 4180. Raises csv.Error for a row that is not, and goes on behind it."""
    csv.field_size_limit(
        max(csv.field_size_limit(), MAX_ROW_BYTES)
    )  # a limit of the process, 128 KiB at first
    return csv.reader(lines, delimiter=separator, strict=True)
