"""Makes batches of columns as torch's default collation makes them of rows, a column at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cachesvc.core.errors import InvalidInput
from loader.datasets.collate import default_collate_into
from loader.datasets.columns.column_reader import Values
from loader.datasets.columns.column_samples import ColumnSamples, Found
from loader.datasets.columns.plain_values import collates_as_torch, number_tensor, shaped_batch, wide_type
from loader.reading.address_range import Bytes
from loader.reading.reader import ExtentReader, Ints

Empty = Callable[[int], Bytes]


def columns_batch(
    samples: ColumnSamples, reader: ExtentReader, ids: Ints, empty: Empty | None, as_tuple: bool
) -> Any:
    """Make a batch of samples; `as_tuple` where samples are tuples. Return None where rows are to be collated: a user
    registered functions, or the samples are of several schemas. Raises InvalidInput, and CorruptData that names a
    sample."""
    found = samples.find(reader, ids) if collates_as_torch() else None
    if not found:
        return None
    name = samples.name_in(ids)

    def collate(values: list[Any]) -> Any:
        return default_collate_into(empty, values, len(values), name)

    try:
        batch = [_column_batch(samples, each, empty, collate) for each in found]
    except ValueError as error:
        if not isinstance(error, InvalidInput):
            samples.rows(reader, ids)  # raises an error that names the sample
        raise
    return shaped_batch(samples.names, batch, as_tuple)


def _column_batch(
    samples: ColumnSamples, found: Found, empty: Empty | None, collate: Callable[[list[Any]], Any]
) -> Any:
    """Return the batch of one column: a tensor of numbers, of lists or tensors of one shape; a list of texts; what
    `collate` makes of other values. `empty` returns memory for a tensor. Raises InvalidInput for nulls."""
    column, values = found.column, found.values
    if values.valid is not None:
        raise InvalidInput(
            f"only some samples of a batch have {column.name}: choose fields= that all have, fill absent values in a "
            "transform, or give a collate_fn"
        )
    if column.kind in ("fixed", "bool") and not column.means:
        return _tensor(column.name, values.data, wide_type(values.data.dtype), empty)
    if column.kind in ("list", "fixed list") and not column.means:
        whole = _even_lists(column.children[0].means, values)
        if whole is not None:
            return _tensor(column.name, whole, whole.dtype, empty)
    whole_column = samples.values(found)
    is_text = whole_column and type(whole_column[0]) in (str, bytes)
    return whole_column if is_text else collate(whole_column)


def _even_lists(means: str, values: Values) -> np.ndarray[Any, Any] | None:
    """Return lists of numbers as rows of one array; None if their lengths differ, or some of the items are null."""
    lengths, items = values.data
    if (
        means
        or items.valid is not None
        or not isinstance(items.data, np.ndarray)
        or items.data.dtype.kind not in "biuf"
    ):
        return None
    if not len(lengths) or (lengths != lengths[0]).any():
        return None
    return items.data.reshape(len(lengths), int(lengths[0]))


def _tensor(name: str, data: np.ndarray[Any, Any], dtype: np.dtype[Any], empty: Empty | None) -> torch.Tensor:
    if data.dtype == np.uint64 and dtype == np.int64 and data.max(initial=0) > np.iinfo(np.int64).max:
        raise InvalidInput(
            f"field {name!r} holds {data.max()}, which no int64 tensor holds: give a collate_fn"
        )
    return number_tensor(data, empty, dtype)
