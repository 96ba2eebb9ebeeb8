"""Encodes labels as the numbers that training takes: class indices, or regression targets.

A sample may have several: a row of classes that apply, or a vector of targets.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from cachesvc.catalog.compiler import Draft, Inputs
from cachesvc.core.errors import InvalidInput
from cachesvc.core.safe_text import printable

ABSENT = 255
"""The cell of a sample without a label, where others are 0 or 1."""
MAX_CELLS = 1 << 30
"""Limit of samples times classes, or times targets."""
MAX_CLASSES = 1 << 20
_FLAGS = {"true": 1.0, "false": 0.0}
_WHOLE = re.compile(r"[+-]?(0|[1-9]\d*)", re.ASCII)
"""Text that is a whole number; "007" is a class name."""
_FRACTION = re.compile(
    r"[+-]?((\d+\.\d*|\.\d+)([eE][+-]?\d+)?|\d+[eE][+-]?\d+|inf|infinity)", re.ASCII | re.I
)
Value = str | int | float
Lists = Sequence[Sequence[Any] | None]
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


def set_labels(draft: Draft, inputs: Inputs, found: EncodedLabels | None) -> None:
    """Set the labels of a draft, one per sample, unless the options want none, and note samples without a label.

    Raises InvalidInput where none were found and the options ask for a kind of label.
    """
    options = inputs.options
    if options.labels_from == "none":
        return
    if found is None and options.label_kind:
        raise InvalidInput(f"{inputs.uri} has no labels, which labels={options.labels!r} asks for")
    if found is None:
        return
    classes, labels = found
    numbers = labels.dtype.kind == "f"
    draft.classes, name = classes, "label.number" if numbers else "label"
    if labels.ndim == 2:
        draft.label_width = labels.shape[1]
        name = "label.number" if numbers else "label.set"
        without = np.flatnonzero(np.isnan(labels).all(1) if numbers else (labels == ABSENT).all(1))
        without_label = "all nan"
    else:
        without = np.flatnonzero(np.isnan(labels) if numbers else labels < 0)
        leave_out = "where(\"label != ''\")" if numbers else 'where("label >= 0")'
        without_label = f"{'nan' if numbers else '-1'}; {leave_out} leaves them out"
    draft.columns[name] = labels.reshape(-1)
    if len(without) and draft.keys is not None:
        draft.notes.append(
            f"{len(without):,} of {len(labels):,} samples have no label, {draft.keys[int(without[0])]!r} is the "
            f"first: their label is {without_label}"
        )
