"""Encodes labels as the numbers that training takes: class indices, or regression targets."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import InvalidInput
from cachesvc.core.safe_text import printable

MAX_CLASSES = 1 << 20
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d*)", re.ASCII)
"""Text that is a whole number; "007" is a class name."""
_FRACTION = re.compile(
    r"[+-]?((\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+|inf|infinity)", re.ASCII | re.I
)
Value = str | int | float
EncodedLabels = tuple[tuple[str, ...], npt.NDArray[Any]]


def is_absent(value: Value) -> bool:
    """Tell whether a value among numbers stands for a missing label."""
    return isinstance(value, str) and value.lower() == "nan"


def encode_labels(values: Sequence[Value], kind: str, uri: str) -> EncodedLabels:
    """Return class names and int32[values], an index into them or -1 for none; or () and float64[values], NaN for none.

    With `kind` "", numbers that are not all whole are float64 targets, and all else is classes. Whole numbers from 0 on
    are class indices, named 0 to the largest. Other whole numbers are classes in ascending order, texts in alphabetical
    order. Raises InvalidInput where `kind` is "float" and a label is not a number.
    """
    distinct = list(dict.fromkeys(values))
    numbers = {value: as_number(value) for value in distinct}
    given = [value for value in distinct if not is_absent(value)]
    words = [value for value in given if numbers[value] is None]
    if kind == "float" and words:
        raise InvalidInput(
            f"{uri} has the label {printable(str(words[0]))!r}, which is no number, as labels='float' needs"
        )
    numeric = bool(given) and not words
    whole = numeric and all(isinstance(numbers[value], int) for value in given)
    if kind == "float" or (not kind and numeric and not whole):
        targets = {value: math.nan if number is None else float(value) for value, number in numbers.items()}
        return (), np.asarray([targets[value] for value in values], np.float64)
    if not numeric:
        return _by_name([str(value) for value in values], sorted({str(value) for value in distinct}))
    names = [None if is_absent(value) else str(numbers[value] if whole else value) for value in values]
    if whole:
        return _by_name(names, _whole_classes({int(numbers[value]) for value in given}))  # type: ignore[arg-type]
    return _by_name(names, sorted({str(value) for value in given}, key=lambda name: (float(name), name)))


def mixed_label(values: Sequence[Value]) -> str:
    """Return the first label that is not a number where others are numbers with a fraction; else ""."""
    word, fraction = "", False
    for value in dict.fromkeys(values):
        number = as_number(value)
        if number is None and not is_absent(value):
            word = word or str(value)
        fraction = fraction or isinstance(number, float)
    return word if fraction else ""


def _by_name(values: Sequence[str | None], classes: Sequence[str]) -> EncodedLabels:
    index: dict[str | None, int] = {name: number for number, name in enumerate(classes)}
    index[None] = -1
    return tuple(classes), np.asarray([index[value] for value in values], np.int32)


def _whole_classes(numbers: set[int]) -> list[str]:
    if min(numbers) >= 0 and max(numbers) < MAX_CLASSES:
        return [str(number) for number in range(max(numbers) + 1)]
    return [str(number) for number in sorted(numbers)]


def as_number(value: Value) -> int | float | None:
    """Return an int for a whole number in any spelling, else a float; None for anything else, such as NaN."""
    if isinstance(value, str):
        if _WHOLE.fullmatch(value):
            return int(value)
        if not _FRACTION.fullmatch(value):
            return None
    number = value if isinstance(value, int) else float(value)
    return int(number) if isinstance(number, float) and number.is_integer() else number
