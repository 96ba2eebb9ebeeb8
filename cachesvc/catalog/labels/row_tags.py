"""Collects searchable values of rows, of which there may be many millions: 4 or 8 bytes a value, each text once."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from math import isnan, nan
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.catalog.columns import Array, TextColumn, ints
from cachesvc.catalog.labels.tags import MAX_TAGS, number_of, tag_name

MAX_TAG_BYTES = 64
"""A longer value is data, not a tag."""
MAX_TEXTS = 1 << 20
"""Limit of the distinct texts of all tags, about 200 MB while they are collected."""
MAX_VALUES = 1 << 28
"""Limit of the values of all tags, at most 2 GiB."""
_MAX_NAMES = 4096
"""Limit of names that are remembered: data may have millions."""
_MAX_INTEGER = 10**64
PENDING = 8192
"""Values of a tag that are taken over at a time."""
_EXACT = 2**53
_NAN = ("nan", "NaN")
_TYPES = frozenset({str, int, float, bool})

_Value = str | int | float


class RowTags:
    """Values by tag and sample, added in ascending order of samples. `notes` names the tags beyond the limits."""

    def __init__(
        self, most_texts: int = MAX_TEXTS, most_values: int = MAX_VALUES, pending: int = PENDING
    ) -> None:
        self._most_texts, self._most_values, self._pending = most_texts, most_values, pending
        self._columns: dict[str, _TagColumn] = {}
        self._of_name: dict[str, _TagColumn | None] = {}
        self._dropped: dict[str, None] = {}
        self._texts = 0

    def add_all(self, sample: int, items: Iterable[tuple[str, Any]]) -> None:
        """Add the values of a row that are numbers or texts of at most `MAX_TAG_BYTES`."""
        for name, value in items:
            if type(value) in _TYPES and (type(value) is not str or 0 < len(value) <= MAX_TAG_BYTES):
                column = self._of_name[name] if name in self._of_name else self._column(name)
                if column is not None:
                    column.samples.append(sample)
                    column.values.append(value)
                    if len(column.values) == self._pending:
                        self._take(column)

    def _column(self, name: str) -> _TagColumn | None:
        """Return the column of a new name, None for one beyond the limits."""
        tag = name if name == "label" else tag_name(name[:MAX_TAG_BYTES])
        column = self._columns.get(tag)
        if column is None and tag not in self._dropped and len(self._columns) < MAX_TAGS:
            column = self._columns[tag] = _TagColumn()
        if len(self._of_name) < _MAX_NAMES:
            self._of_name[name] = column
            if column is None:
                self._dropped[tag] = None
        return column

    def _take(self, column: _TagColumn) -> None:
        samples = column.samples[-1] + 1 if column.samples else 0
        self._texts += column.take()
        while len(self._columns) * samples > self._most_values:
            self._drop(next(reversed(self._columns)))
        if self._texts > self._most_texts:
            self._drop(max(self._columns, key=lambda name: self._columns[name].texts))

    def _drop(self, tag: str) -> None:
        dropped = self._columns.pop(tag)
        self._texts -= dropped.texts
        self._of_name = {name: column for name, column in self._of_name.items() if column is not dropped}
        self._dropped[tag] = None

    def columns(self, samples: int) -> dict[str, Array | tuple[Array, TextColumn]]:
        """Return the tags, as `Tags.columns` does, as many as fit the limits."""
        for column in list(self._columns.values()):
            self._take(column)
        while len(self._columns) * samples > self._most_values:
            self._drop(next(reversed(self._columns)))
        return {tag: self._columns[tag].column(samples) for tag in sorted(self._columns)}

    def notes(self) -> list[str]:
        """Return the note on columns that are left out."""
        if not self._dropped:
            return []
        some = ", ".join(list(self._dropped)[:4])
        return [
            f"{len(self._dropped):,} columns are not searchable, being too many or of too many values: {some}"
        ]


class _TagColumn:
    """One tag: numbers until the first text, then codes of texts. `values` of `samples` were added, but not taken over."""

    def __init__(self) -> None:
        self.samples, self.values = array("q"), list[_Value]()
        self._numbers: array[float] | None = array("d")
        self._codes = array("i")
        self._code_of: dict[str, int] = {}

    @property
    def texts(self) -> int:
        """The number of distinct texts."""
        return len(self._code_of)

    def take(self) -> int:
        """Take over the values added last. Return how many texts are new."""
        samples, values, before = self.samples, self.values, self.texts
        self.samples, self.values = array("q"), []
        if any(map(_is_no_tag, values)):
            kept = [at for at, value in enumerate(values) if not _is_no_tag(value)]
            samples, values = array("q", (samples[at] for at in kept)), [values[at] for at in kept]
        if not values:
            return 0
        numbers = None if self._numbers is None else _floats(values)
        if self._numbers is not None and numbers is not None:
            _put(self._numbers, ints(samples), numbers, nan)
            return 0
        if self._numbers is not None:  # spell the numbers: they are codes of texts from now on
            self._codes = array("i", (-1 if isnan(n) else self._code(_spelled(n)) for n in self._numbers))
            self._numbers = None
        _put(
            self._codes, ints(samples), np.asarray([self._code(str(value)) for value in values], np.int32), -1
        )
        return self.texts - before

    def _code(self, text: str) -> int:
        """Return the code of a text. Lone surrogates, which JSON may hold and UTF-8 may not, become question marks."""
        known = text if text.isascii() else text.encode(errors="replace").decode()
        return self._code_of.setdefault(known, len(self._code_of))

    def column(self, samples: int) -> Array | tuple[Array, TextColumn]:
        """Return float64[samples], NaN for none; or int32 codes, -1 for none, and the texts."""
        if self._numbers is not None:
            return _filled(self._numbers, samples, nan)
        return _filled(self._codes, samples, -1), TextColumn(self._code_of)


def _is_no_tag(value: _Value) -> bool:
    """Tell whether a value is too long, or NaN, which is no value as in a column of numbers."""
    if isinstance(value, str):
        too_long = not value.isascii() and len(value.encode(errors="replace")) > MAX_TAG_BYTES
        return too_long or value in _NAN
    return value != value or (isinstance(value, int) and abs(value) >= _MAX_INTEGER)


def _floats(values: Sequence[_Value]) -> npt.NDArray[np.float64] | None:
    """Return values as float64, None where it does not hold one of them exactly."""
    if set(map(type, values)) <= {float, int, bool}:
        found = np.asarray([float(value) for value in values])
        if not (np.abs(found) >= _EXACT).any():
            return found
    numbers = [number_of(value) for value in values]
    return None if None in numbers else np.asarray(numbers, np.float64)


def _put(column: array[Any], samples: npt.NDArray[np.int64], values: npt.NDArray[Any], absent: float) -> None:
    """Set the values of samples; of two values for one sample the first."""
    _filled(column, int(samples[-1]) + 1, absent)[samples[::-1]] = values[::-1]


def _filled(column: array[Any], length: int, absent: float) -> npt.NDArray[Any]:
    """Return a column that is at least of this length, as an array over its memory."""
    if len(column) < length:
        column.extend(array(column.typecode, [absent]) * (length - len(column)))
    return np.frombuffer(column, column.typecode)


def _spelled(number: float) -> str:
    return str(int(number)) if number.is_integer() else str(number)
