"""Collates rows of texts and numbers a column at a time, to what torch's default collation makes of them.

torch's own collation, and the checks that name a sample in errors, cost several Python calls for each value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import default_collate_fn_map

from loader.reading.address_range import Bytes

Empty = Callable[[int], Bytes]
"""Returns memory of a size in bytes for a batch."""
_DTYPES = {int: np.dtype(np.int64), float: np.dtype(np.float64), bool: np.dtype(np.bool_)}
"""Types that torch gives Python's numbers."""
_TORCHS = dict(default_collate_fn_map)
"""torch's functions, before a user registers others."""
_PLAIN = frozenset({str, bytes, *_DTYPES})


def is_plain(row: Any) -> bool:
    """Tell whether a row is a dict or a tuple of texts and numbers alone."""
    if type(row) is dict:
        return bool(row) and _PLAIN.issuperset(map(type, row.values()))
    return type(row) is tuple and bool(row) and _PLAIN.issuperset(map(type, row))


def plain_batch(rows: Sequence[Any], empty: Empty | None) -> Any:
    """Collate rows of which the first `is_plain`. `empty` returns memory of a size in bytes; None means new memory.

    Return None where torch's collation must decide: rows differ in their fields, a column in its types, or a number does
    not fit.
    """
    first = rows[0]
    if type(first) is tuple:
        if any(type(row) is not tuple or len(row) != len(first) for row in rows):
            return None
        batch = [plain_column(column, empty) for column in zip(*rows, strict=True)]
        return None if any(column is None for column in batch) else batch
    names = first.keys()
    if any(type(row) is not dict or row.keys() != names for row in rows):
        return None
    found = {name: plain_column([row[name] for row in rows], empty) for name in names}
    return None if any(column is None for column in found.values()) else found


def plain_column(values: Sequence[Any], empty: Empty | None) -> Any:
    """Return texts as they are, numbers as a tensor, and None for values that are neither or of several types."""
    kinds = set(map(type, values))
    kind = kinds.pop()
    if kinds or kind not in _PLAIN:
        return None
    if kind not in _DTYPES:
        return values
    try:
        return number_tensor(np.array(values, _DTYPES[kind]), empty)
    except OverflowError:
        return None


def number_tensor(
    data: np.ndarray[Any, Any], empty: Empty | None, dtype: np.dtype[Any] | None = None
) -> torch.Tensor:
    """Return numbers as a tensor of a type, their own if none is given."""
    dtype = dtype or data.dtype
    if empty is None:
        return torch.from_numpy(data.astype(dtype, order="C"))
    out = empty(data.size * dtype.itemsize).view(dtype).reshape(data.shape)
    np.copyto(out, data, casting="unsafe")
    return torch.from_numpy(out)


def wide_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type that torch gives Python's numbers of this type."""
    return np.dtype(bool) if dtype.kind == "b" else np.dtype(np.float64 if dtype.kind == "f" else np.int64)


def shaped_batch(names: Sequence[str], columns: Sequence[Any], as_tuple: bool) -> Any:
    """Return columns as the batch of tuples, of single values, or of dicts. Texts are tuples in the first, and lists in the
    others, as torch has them."""
    texts = tuple if as_tuple else list
    made = [
        texts(each) if type(each) in (list, tuple) and type(each[0]) in (str, bytes) else each
        for each in columns
    ]
    if as_tuple:
        return made
    return made[0] if len(made) == 1 else dict(zip(names, made, strict=True))


def collates_as_torch() -> bool:
    """Tell whether the user has registered no function for a type."""
    return default_collate_fn_map == _TORCHS
