"""Encodes labels of several values for each sample: a row of classes that apply, or a vector of targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cachesvc.catalog.labels.label_encoding import EncodedLabels, Value, as_number, encode_labels
from cachesvc.core.errors import InvalidInput
from cachesvc.core.safe_text import printable

ABSENT = 255
"""The cell of a sample without a label, where others are 0 or 1."""
MAX_CELLS = 1 << 30
"""Limit of samples times classes, or times targets."""
_FLAGS = {"true": 1.0, "false": 0.0}
Lists = Sequence[Sequence[Any] | None]


def encode_lists(values: Lists, kind: str, uri: str) -> EncodedLabels:
    """Encode one list of values for each sample, None for none.

    With `kind` "", numbers that are not all whole are targets: float64[samples, n], NaN for none. All else is classes:
    uint8[samples, classes], 1 for each class in the list, `ABSENT` for none. Raises InvalidInput for values that are
    neither text nor numbers, and for targets of several lengths.
    """
    flat = [value for each in values for value in each or ()]
    wrong = [value for value in flat if not isinstance(value, (str, int, float))]
    if wrong:
        raise InvalidInput(
            f"{uri} has the label {printable(repr(wrong[0]))[:200]}: give texts or numbers, or lists of them"
        )
    numbers = [as_number(value) for value in flat]
    if kind == "float" or (not kind and _are_targets(numbers)):
        return _vectors(values, uri)
    classes, codes = encode_labels([_plain(value) for value in flat], "class", uri)
    found = _cells(len(values), len(classes), np.uint8, uri)
    found[[at for at, each in enumerate(values) if each is None]] = ABSENT
    rows = np.repeat(np.arange(len(values)), [len(each or ()) for each in values])
    found[rows[codes >= 0], codes[codes >= 0]] = 1
    return classes, found


def encode_columns(values: Lists, names: tuple[str, ...], uri: str) -> EncodedLabels:
    """Encode the values of several columns as targets, float64[samples, columns]. The classes are the columns' names.

    An empty cell is NaN; true and false are 1 and 0. Raises InvalidInput for other texts.
    """
    found = _cells(len(values), len(names), np.float64, uri)
    found[:] = np.nan
    for at, each in enumerate(values):
        for column, value in enumerate(each or ()):
            number = _flag_or_number(value)
            if number is None:
                raise InvalidInput(
                    f"{uri} has {printable(repr(value))[:200]} in the column {names[column]!r}, which is no number, as "
                    "several targets need"
                )
            found[at, column] = number
    return names, found


def _vectors(values: Lists, uri: str) -> EncodedLabels:
    lengths = sorted({len(each) for each in values if each})
    if len(lengths) != 1:
        found = " and of ".join(map(str, lengths[:2])) or "no"
        raise InvalidInput(
            f'{uri} has lists of {found} numbers as labels: give all samples as many, or labels={{"kind": "class"}} for '
            "classes"
        )
    return (), encode_columns(values, tuple(map(str, range(lengths[0]))), uri)[1]


def _are_targets(numbers: Sequence[int | float | None]) -> bool:
    return bool(numbers) and None not in numbers and not all(isinstance(number, int) for number in numbers)


def _flag_or_number(value: Any) -> float | None:
    """Return NaN for an empty cell, None for what is no number."""
    if value is None or (isinstance(value, str) and value.strip().lower() in ("", "nan")):
        return np.nan
    if isinstance(value, str) and value.lower() in _FLAGS:
        return _FLAGS[value.lower()]
    number = as_number(value) if isinstance(value, (str, int, float)) else None
    return value if isinstance(value, float) else number


def _plain(value: Value) -> Value:
    if isinstance(value, bool):
        return str(value)
    return value.encode(errors="replace").decode() if isinstance(value, str) else value


def _cells(samples: int, width: int, dtype: Any, uri: str) -> np.ndarray[Any, Any]:
    if samples * width > MAX_CELLS:
        raise InvalidInput(
            f"{uri} has {samples:,} samples with {width:,} classes or targets each: {MAX_CELLS:,} numbers at most are "
            "kept; make labels in transform="
        )
    return np.zeros((samples, width), dtype)
