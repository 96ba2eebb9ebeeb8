"""Makes Python's values of columns, as pyarrow and Hugging Face show them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import date, datetime, time, timedelta, timezone, tzinfo
from decimal import Decimal
from itertools import accumulate, pairwise
from typing import Any, cast
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np

from cachesvc.catalog.row_syntax import json_value
from cachesvc.sources.columnar.column import Column
from loader.datasets.samples.column_reader import Values
from loader.reading.reader import Ints

_EPOCH = date(1970, 1, 1).toordinal()
_PER_SECOND = {"s": 1, "ms": 1_000, "us": 1_000_000, "ns": 1_000_000_000}


def python_values(column: Column, values: Values, arrays: bool = False) -> list[Any]:
    """Return a value for each row, None for null. With `arrays`, lists of numbers without nulls are arrays, as are
    tensors in any case. Raises ValueError for what Python cannot hold, UnicodeDecodeError for text that is not UTF-8."""
    return _with_nulls(values, _converted(column, values.data, arrays))


def stored_values(column: Column, values: Values) -> list[Any]:
    """Return the bytes of each row's number, text or list of numbers; other values as `python_values` does."""
    item = column.children[0] if column.kind in ("list", "fixed list") else None
    if _value_column(column).kind in ("text", "view", "constant"):
        return _with_nulls(values, list(values.data))
    if column.kind in ("fixed", "bool"):
        return _with_nulls(values, _bytes_of(values.data))
    if item is not None and item.kind in ("fixed", "bool") and values.data[1].valid is None:
        lengths, items = values.data
        raw = np.ascontiguousarray(items.data).tobytes()
        bounds = [0, *accumulate((lengths * items.data.itemsize).tolist())]
        return _with_nulls(values, [raw[low:high] for low, high in pairwise(bounds)])
    return python_values(column, values)


def _value_column(column: Column) -> Column:
    while column.kind == "coded":
        column = column.children[0]
    return column


def _with_nulls(values: Values, found: list[Any]) -> list[Any]:
    if values.valid is None:
        return found
    given = iter(found)
    return [next(given) if valid else None for valid in values.valid.tolist()]


def _bytes_of(data: np.ndarray[Any, Any]) -> list[bytes]:
    width, raw = data.dtype.itemsize, data.tobytes()
    return [raw[at : at + width] for at in range(0, len(raw), width)]


def _converted(column: Column, data: Any, arrays: bool) -> list[Any]:
    """Return the values that are not null."""
    column = _value_column(column)
    kind, _, rest = column.means.partition(":")
    if kind in ("tensor", "ragged"):
        return _tensors(column, data, kind, rest)
    if column.kind == "struct":
        parts = [python_values(each, found) for each, found in zip(column.children, data, strict=True)]
        names = [each.name for each in column.children]
        if not parts:
            return []
        return [dict(zip(names, each, strict=True)) for each in zip(*parts, strict=True)]
    if column.kind in ("list", "fixed list"):
        return _lists(column, data, arrays)
    return _CONVERSIONS[kind](data, rest)


def _lists(column: Column, data: tuple[Ints, Values], arrays: bool) -> list[Any]:
    (lengths, items), (item,) = data, column.children
    bounds = [0, *accumulate(lengths.tolist())]
    if arrays and item.kind in ("fixed", "bool") and not item.means:
        if items.valid is None:
            return [items.data[low:high].copy() for low, high in pairwise(bounds)]
        holed = np.append(0, np.cumsum(~items.valid))[bounds]
        every = np.zeros(items.count, items.data.dtype)
        every[items.valid] = items.data
        plain = python_values(item, items)
        spans = zip(pairwise(bounds), pairwise(holed.tolist()), strict=True)
        return [
            plain[low:high] if more > none else every[low:high].copy() for (low, high), (none, more) in spans
        ]
    if column.means == "map":
        key, value = (python_values(*each) for each in zip(item.children, items.data, strict=True))
        whole: list[Any] = list(zip(key, value, strict=True))
    else:
        whole = python_values(item, items)
    return [whole[low:high] for low, high in pairwise(bounds)]


# ---- tensors


def _tensors(column: Column, data: Any, kind: str, rest: str) -> list[Any]:
    if kind == "ragged":
        parts = {
            each.name: python_values(each, found, True)
            for each, found in zip(column.children, data, strict=True)
        }
        order = [int(each) for each in rest.split(",") if each]
        return [
            _permuted(np.asarray(flat).reshape(np.asarray(shape).tolist()), order)
            for flat, shape in zip(parts["data"], parts["shape"], strict=True)
        ]
    sides, _, permutation = rest.partition(":")
    shape = [int(each) for each in sides.split(",") if each]
    order = [int(each) for each in permutation.split(",") if each]
    leaf = column
    while leaf.children:
        leaf = leaf.children[0]
    dtype = np.dtype(bool if leaf.kind == "bool" else leaf.dtype or object)
    return [_tensor(value, dtype, shape, order) for value in _lists(column, data, True)]


def _tensor(value: Any, dtype: np.dtype[Any], shape: list[int], order: list[int]) -> Any:
    """Return an array; nested lists if some of its numbers are null."""
    flat = list(_flat(value)) if isinstance(value, list) else value
    holed = isinstance(flat, list) and any(each is None for each in flat)
    found = _permuted(np.array(flat, object if holed else dtype).reshape(shape), order)
    return found.tolist() if holed else found


def _flat(value: Any) -> Any:
    for each in value:
        if isinstance(each, list):
            yield from _flat(each)
        else:
            yield each


def _permuted(found: np.ndarray[Any, Any], order: Sequence[int]) -> np.ndarray[Any, Any]:
    return found.transpose(*order).copy() if order else found


# ---- single values


def _decimals(data: Any, scale: str) -> list[Any]:
    # from text: arithmetic would round to the precision of the context
    return [Decimal(f"{int.from_bytes(raw, 'little', signed=True)}E{-int(scale)}") for raw in _bytes_of(data)]


def _dates(data: Any, unit: str) -> list[Any]:
    days = data.astype(np.int64) // (86_400_000 if unit == "ms" else 1)
    last = date.max.toordinal() - _EPOCH
    return [
        date.fromordinal(each + _EPOCH) if -_EPOCH < each <= last else np.datetime64(each, "D")
        for each in days.tolist()
    ]


def _times(data: Any, unit: str) -> list[Any]:
    found = []
    for each in data.tolist():
        seconds, part = divmod(each, _PER_SECOND[unit])
        micros, rest = divmod(part * 1_000_000, _PER_SECOND[unit])
        if rest or not 0 <= seconds < 86_400:
            found.append(np.timedelta64(each, cast(Any, unit)))
        else:
            found.append(time(seconds // 3600, seconds // 60 % 60, seconds % 60, micros))
    return found


def _timestamps(data: Any, rest: str) -> list[Any]:
    unit, _, name = rest.partition(":")
    zone = _zone(name) if name else None
    begin = datetime(1970, 1, 1, tzinfo=timezone.utc if zone else None)
    found: list[Any] = []
    for each in data.tolist():
        micros, part = divmod(each * 1_000_000, _PER_SECOND[unit])
        try:
            if part:
                raise OverflowError
            moment = begin + timedelta(microseconds=micros)
            found.append(moment.astimezone(zone) if zone else moment)
        except OverflowError:  # parts of a microsecond, or a year that Python does not count
            found.append(np.datetime64(each, cast(Any, unit)))
    return found


def _zone(name: str) -> tzinfo:
    if name in ("UTC", "utc", "Z", "+00:00"):
        return timezone.utc
    if name[:1] in "+-":
        hours, _, minutes = name[1:].partition(":")
        offset = timedelta(hours=int(hours[:2]), minutes=int(minutes or hours[2:] or 0))
        return timezone(-offset if name[0] == "-" else offset)
    return ZoneInfo(name)


def _durations(data: Any, unit: str) -> list[Any]:
    found: list[Any] = []
    for each in data.tolist():
        micros, part = divmod(each * 1_000_000, _PER_SECOND[unit])
        try:
            found.append(np.timedelta64(each, cast(Any, unit)) if part else timedelta(microseconds=micros))
        except OverflowError:
            found.append(np.timedelta64(each, cast(Any, unit)))
    return found


_CONVERSIONS: dict[str, Callable[[Any, str], list[Any]]] = {
    "": lambda data, _: data.tolist(),
    "text": lambda data, _: [raw.decode() for raw in data],
    "json": lambda data, _: [json_value(raw) for raw in data],
    "bytes": lambda data, _: _bytes_of(data) if isinstance(data, np.ndarray) else list(data),
    "decimal": _decimals,
    "date": _dates,
    "time": _times,
    "timestamp": _timestamps,
    "duration": _durations,
    "uuid": lambda data, _: [UUID(bytes=raw) for raw in _bytes_of(data)],
    "bool8": lambda data, _: (data != 0).tolist(),
    "whole": lambda data, _: [int(raw) for raw in data],
}
"""By what the values of a column mean, before a colon."""
