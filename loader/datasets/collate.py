"""torch's default collation, with tensors and arrays stacked straight into the memory that a batch is handed over in.

torch stacks into new memory, in a worker into a new shared file for each batch, and makes a tensor of each array
first. What is not plain numbers of one shape and type goes torch's way, and so do types that the user registered.

Large values are copied as their samples come, so that what a picture was decoded into is free for the next one and
still in a core's cache: 32 pictures of 500 x 375 that wait until the batch is whole are 18 MB.
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
from loader.datasets.shape_mismatch import SampleName, describe_mismatch, name_by_place
from loader.reading.address_range import Bytes

Empty = Callable[[int], Bytes]
_TORCHS = {torch.Tensor: collate_tensor_fn, np.ndarray: collate_numpy_array_fn}
_NUMBERS = "biufc"
LARGE_BYTES = 16 << 10
"""Smaller values wait for the others: one stack costs less than a copy each."""


def default_collate_into(
    empty: Empty | None, samples: Iterable[Any], count: int, name: SampleName = name_by_place
) -> Any:
    """What `torch.utils.data.default_collate` makes of `count` samples, in memory that `empty` gives for a size in
    bytes; in new memory where that is None. `name`: of a sample, by its place. Raises InvalidInput where samples differ in
    shape, and where only some of them have a field: torch would leave it out of a whole batch, or raise, by which sample
    comes first."""
    stacks: dict[type, Callable[..., Any]] = {np.ndarray: _arrays(empty or _new)}
    if empty is not None:
        stacks[torch.Tensor] = _tensors(empty)
    kinds = frozenset(kind for kind in stacks if default_collate_fn_map.get(kind) is _TORCHS[kind])
    columns = _Columns(kinds, empty or _new, count)
    stackers: dict[type | tuple[type, ...], Callable[..., Any]] = {
        kind: columns.or_else(stacks[kind]) for kind in kinds
    }
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
    registered = default_collate_fn_map.keys() & {dict, tuple, type(None)}  # what the user registered
    if registered or not samples or type(samples[0]) not in (dict, tuple):
        return
    found = [_fields(each) for each in samples]
    if found.count(found[0]) < len(found):
        partial = sorted(map(str, frozenset().union(*found).difference(frozenset.intersection(*found))))
        raise InvalidInput(
            f"only some samples of a batch have {', '.join(partial)}: name fields= that all have, set what is absent in a"
            " transform, or give a collate_fn"
        )


def _fields(sample: Any) -> frozenset[Any]:
    """Names in a dict; places in a tuple, of values that are not absent."""
    if type(sample) is dict:
        return frozenset(sample)
    places = enumerate(sample) if type(sample) is tuple else ()
    return frozenset(f"a value {place}" for place, value in places if value is not None)


def _new(size_bytes: int) -> Bytes:
    return np.empty(size_bytes, np.uint8)


def _tensors(empty: Empty) -> Callable[..., Any]:
    def stack(batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if {type(each) for each in batch} == {torch.Tensor} and len({each.dtype for each in batch}) == 1:
            try:
                memory = torch.from_numpy(empty(len(batch) * first.numel() * first.element_size()))
                return torch.stack(tuple(batch), out=memory.view(first.dtype).view(len(batch), *first.shape))
            except (RuntimeError, TypeError):  # of several shapes, sparse, with gradients, not on this device
                pass
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)

    return stack


def _arrays(empty: Empty) -> Callable[..., Any]:
    def stack(batch: Sequence[np.ndarray[Any, Any]], *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        one = len({each.dtype for each in batch}) == len({each.shape for each in batch}) == 1
        if one and first.dtype.kind in _NUMBERS and first.dtype.isnative:
            memory = empty(len(batch) * first.nbytes)
            return torch.from_numpy(
                np.stack(batch, out=memory.view(first.dtype).reshape(len(batch), *first.shape))
            )
        return collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)

    return stack


class _Columns:
    """Large values of the samples of one batch, each in its row of the batch's memory as soon as it comes."""

    def __init__(self, kinds: frozenset[type], empty: Empty, count: int) -> None:
        self._kinds, self._empty, self._count = kinds, empty, count
        self._columns: list[_Column] = []

    def placed(self, sample: Any) -> Any:
        """The sample, with rows for its large values. The n-th of a sample goes to the n-th column."""
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

    def or_else(self, stack: Callable[..., Any]) -> Callable[..., Any]:
        """Stacks values: those of a whole column lie stacked, `stack` does the rest."""

        def stacked(batch: Sequence[Any], *, collate_fn_map: Any = None) -> Any:
            for column in self._columns:
                if len(batch) == len(column.rows) and all(map(is_, batch, column.rows)):
                    return torch.as_tensor(column.stacked[: len(batch)])
            return stack(batch, collate_fn_map=collate_fn_map)

        return stacked


class _Column:
    """Room for values of one kind, type and shape, those of the first, and the rows of it that are taken."""

    def __init__(self, first: Any, memory: Bytes, count: int) -> None:
        like_first = memory if isinstance(first, np.ndarray) else torch.from_numpy(memory)
        self.stacked = like_first.view(first.dtype).reshape(count, *first.shape)
        self.rows: list[Any] = []

    def row(self, value: Any) -> Any:
        """The next row, with the value in it; the value itself where it is unlike the first."""
        at = len(self.rows)
        like = type(value) is type(self.stacked) and value.dtype == self.stacked.dtype
        if not like or at == len(self.stacked) or value.shape != self.stacked.shape[1:]:
            return value
        self.rows.append(self.stacked[at])
        self.rows[at][...] = value
        return self.rows[at]


def _is_large(value: Any) -> bool:
    """And plain numbers in this machine's memory."""
    if isinstance(value, np.ndarray):
        return value.nbytes >= LARGE_BYTES and value.dtype.kind in _NUMBERS and value.dtype.isnative
    plain = value.layout == torch.strided and value.device.type == "cpu"
    plain = plain and not (value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg())
    return plain and not value.is_nested and value.nbytes >= LARGE_BYTES
