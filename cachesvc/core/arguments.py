"""Checks of callers' arguments."""

from __future__ import annotations

import math
import operator
from collections.abc import Collection, Mapping
from typing import Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import InvalidInput


def whole_number(name: str, given: Any, low: int, high: int) -> int:
    """An argument as an int, numpy's integers included. Raises InvalidInput for anything else, also for a bool,
    and for a number outside [low, high]."""
    try:
        number = None if isinstance(given, bool) else operator.index(given)
    except TypeError:
        number = None
    if number is None or not low <= number <= high:
        raise InvalidInput(f"{name}={_short(given)}: give a whole number from {low:,} to {high:,}")
    return number


def text(name: str, given: Any) -> str:
    """An argument as text. Raises InvalidInput for anything else, and for lone surrogates, which no message can hold."""
    if not isinstance(given, str) or given != given.encode(errors="replace").decode():
        raise InvalidInput(f"{name}={_short(given)}: give it as text")
    return given


def flag(name: str, given: Any) -> bool:
    """An argument as a bool; numpy's bools, 0 and 1 are allowed. Raises InvalidInput for anything else: any text, even
    "no", would count as true."""
    if isinstance(given, (bool, int, np.bool_)) and given in (0, 1):
        return bool(given)
    raise InvalidInput(f"{name}={_short(given)}: give True or False")


def one_of(name: str, given: Any, choices: Collection[object], none: str = "") -> None:
    """Raise InvalidInput for an argument that is none of the choices. `none`: the error's end where None is allowed too."""
    if given not in choices and not (none and given is None):
        raise InvalidInput(f"{name}={_short(given)}: give one of {', '.join(map(repr, choices))}{none}")


def share(name: str, given: Any) -> float:
    """An argument as a number of at least 0, numpy's included. Raises InvalidInput for anything else, also for text, NaN
    and infinity."""
    try:
        number = math.nan if isinstance(given, (str, bytes)) else float(given)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise InvalidInput(f"{name}={_short(given)}: give a number of at least 0")
    return number


def place_of(index: SupportsIndex, count: int, noun: str) -> int:
    """An index into `count` items, negative ones from the end, as 0 <= place < count. Raises TypeError and IndexError, as
    lists do."""
    try:
        number = operator.index(index)
    except TypeError:
        raise TypeError(
            f"the index of a {noun} is a whole number, not {type(index).__name__}: take(n) gives the first ones of a "
            "dataset, select(ids) any"
        ) from None
    if not -count <= number < count:
        raise IndexError(f"{noun} {number} of {count}")
    return number % count


def places_of(indices: npt.ArrayLike, count: int, noun: str) -> npt.NDArray[np.int64]:
    """`place_of` for an array of indices, as int64 of the same shape. Raises TypeError for anything but whole numbers, and
    IndexError."""
    given = np.asarray(indices)
    if not given.size:
        return np.empty(0, np.int64)
    if given.dtype.kind not in "iu":
        raise TypeError(f"indices of {noun}s are whole numbers, not {given.dtype}")
    low, high = int(given.min()), int(given.max())
    if low < -count or high >= count:
        raise IndexError(f"{noun} {high if high >= count else low} of {count}")
    places = given.astype(np.int64, copy=False)
    return np.where(places < 0, places + count, places) if low < 0 else places


def shares(name: str, given: Any) -> list[float]:
    """The values of a mapping, each as a `share`. Raises InvalidInput, also for anything but a mapping."""
    if not isinstance(given, Mapping):
        raise InvalidInput(f"{name}={_short(given)}: give a mapping to numbers of at least 0")
    return [share(f"{name}[{_short(key)}]", value) for key, value in given.items()]


def _short(given: Any) -> str:
    """The value on one line, cut to 80 characters."""
    return " ".join(repr(given).split())[:80]
