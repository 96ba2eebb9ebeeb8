"""torch's default collation, stacking tensors and arrays directly into the memory in which a batch is handed over.

torch stacks into new memory (in a worker, a new shared file per batch) and first makes a tensor of each array.
Values that are not plain numbers of one shape and type go through torch's functions, as do types that the user
registered.

Large values are copied as soon as their sample is made. The memory of a decoded picture is then free for the next
one and still in the processor's cache; 32 pictures of 500 x 375 that wait for the whole batch are 18 MB.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import (
    collate,
    collate_numpy_array_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)

from cachesvc.core.errors import InvalidInput
from loader.datasets.decoding.encoded_images import EncodedImage, stack_encoded
from loader.datasets.plain_values import Empty, collates_as_torch, is_plain, plain_batch
from loader.datasets.shape_mismatch import SampleName, describe_mismatch, name_by_place
from loader.reading.address_range import Bytes

_TORCHS = {torch.Tensor: collate_tensor_fn, np.ndarray: collate_numpy_array_fn}
_STACKS: dict[type, Callable[..., Any]] = {torch.Tensor: torch.stack, np.ndarray: np.stack}
_NUMBERS = "biufc"
LARGE_BYTES = 16 << 10
"""Smaller values are stacked at the end: one stack costs less than a copy each."""


def default_collate_into(
    empty: Empty | None, samples: Iterable[Any], count: int, name: SampleName = name_by_place
) -> Any:
    """Collate `count` samples as `torch.utils.data.default_collate` does.

    `empty` returns memory of a size in bytes for the batch; None means new memory. `name` names the sample in a
    row, for errors. Raises InvalidInput when samples differ in shape, and when only some of them have a field:
    torch would drop the field or raise, depending on which sample comes first.
    """
    rows = iter(samples)
    first = list(itertools.islice(rows, 1))
    samples = itertools.chain(first, rows)
    if first and is_plain(first[0]) and collates_as_torch():
        samples = [*samples]
        batch = plain_batch(samples, empty)
        if batch is not None:
            return batch
    own = (np.ndarray,) if empty is None else (np.ndarray, torch.Tensor)
    kinds = frozenset(kind for kind in own if default_collate_fn_map.get(kind) is _TORCHS[kind])
    columns = _Columns(kinds, empty or _new, count)
    stackers: dict[type | tuple[type, ...], Callable[..., Any]] = dict.fromkeys(kinds, columns.stack)
    stackers[EncodedImage] = stack_encoded(empty or _new)
    placed = [columns.placed(each) for each in samples]
    _check_fields(placed)
    try:
        return collate(placed, collate_fn_map={**default_collate_fn_map, **stackers})
    except RuntimeError as error:
        found = describe_mismatch(placed, name)
        if not found:
            raise
        raise InvalidInput(
            f"samples of a batch differ: {found}; make them alike in a transform, or give a collate_fn"
        ) from error


def _check_fields(samples: Sequence[Any]) -> None:
    # types for which the user registered a collate function
    registered = default_collate_fn_map.keys() & {dict, tuple, type(None)}
    if registered or not samples or type(samples[0]) not in (dict, tuple):
        return
    found = [_fields(each) for each in samples]
    if found.count(found[0]) < len(found):
        partial = sorted(map(str, frozenset().union(*found).difference(frozenset.intersection(*found))))
        raise InvalidInput(
            f"only some samples of a batch have {', '.join(partial)}: choose fields= that all have, fill absent"
            " values in a transform, or give a collate_fn"
        )


def _fields(sample: Any) -> frozenset[Any]:
    """Return the keys of a dict, or the places in a tuple, whose value is not None."""
    if type(sample) is dict:
        return frozenset(name for name, value in sample.items() if value is not None)
    places = enumerate(sample) if type(sample) is tuple else ()
    return frozenset(f"a value {place}" for place, value in places if value is not None)


def _new(size_bytes: int) -> Bytes:
    return np.empty(size_bytes, np.uint8)


class _Columns:
    """The large values of one batch, each copied to its row of the batch's memory as soon as its sample is made."""

    def __init__(self, kinds: frozenset[type], empty: Empty, count: int) -> None:
        self._kinds, self._empty, self._count = kinds, empty, count
        self._columns: list[_Column] = []

    def placed(self, sample: Any) -> Any:
        """Return the sample with its large values replaced by rows. The n-th large value goes to the n-th column."""
        return self._placed(sample, itertools.count())

    def _placed(self, value: Any, numbers: Iterator[int]) -> Any:
        kind = type(value)
        if kind in self._kinds:
            return value if not _is_large(value) else self._row(value, next(numbers))
        if kind is tuple or kind is list:
            return kind(self._placed(each, numbers) for each in value)
        if kind is dict:
            return {name: self._placed(each, numbers) for name, each in value.items()}
        return value

    def _row(self, value: Any, number: int) -> Any:
        if number == len(self._columns):
            memory = self._empty(self._count * value.nbytes)
            self._columns.append(_Column(value, memory, self._count))
        return self._columns[number].row(value)

    def stack(self, batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
        """Stack values, as torch's collation calls it. A whole column is stacked already."""
        for column in self._columns:
            if len(batch) == len(column.rows) and all(map(is_, batch, column.rows)):
                return torch.as_tensor(column.stacked[: len(batch)])
        kind = np.ndarray if isinstance(batch[0], np.ndarray) else torch.Tensor
        if _stack_alike(batch):
            try:
                out = _Column(batch[0], self._empty(len(batch) * batch[0].nbytes), len(batch)).stacked
                return torch.as_tensor(_STACKS[kind](tuple(batch), out=out))
            except (RuntimeError, TypeError):  # different shapes, sparse, with gradients, or on a device
                pass
        return _TORCHS[kind](batch, collate_fn_map=collate_fn_map)


def _stack_alike(batch: Sequence[Any]) -> bool:
    """Return whether values have one type; arrays also one shape, and numbers of it."""
    first = batch[0]
    if isinstance(first, np.ndarray):
        one = len({(each.dtype, each.shape) for each in batch}) == 1
        return one and first.dtype.kind in _NUMBERS and first.dtype.isnative
    return {(type(each), each.dtype) for each in batch} == {(torch.Tensor, first.dtype)}


class _Column:
    """Memory for the values of one column, all like the first one, and the rows in use."""

    def __init__(self, first: Any, memory: Bytes, count: int) -> None:
        like_first = memory if isinstance(first, np.ndarray) else torch.from_numpy(memory)
        self.stacked = like_first.view(first.dtype).reshape(count, *first.shape)
        self.rows: list[Any] = []

    def row(self, value: Any) -> Any:
        """Copy a value to the next row and return the row. Returns the value itself if it differs from the first in
        type or shape, or if no row is left."""
        at = len(self.rows)
        like = type(value) is type(self.stacked) and value.dtype == self.stacked.dtype
        if not like or at == len(self.stacked) or value.shape != self.stacked.shape[1:]:
            return value
        self.rows.append(self.stacked[at])
        self.rows[at][...] = value
        return self.rows[at]


def _is_large(value: Any) -> bool:
    """Return whether a value is large and consists of plain numbers in CPU memory."""
    if isinstance(value, np.ndarray):
        return value.nbytes >= LARGE_BYTES and value.dtype.kind in _NUMBERS and value.dtype.isnative
    plain = value.layout == torch.strided and value.device.type == "cpu"
    plain = plain and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
    return plain and not value.is_nested and value.nbytes >= LARGE_BYTES
