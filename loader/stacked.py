"""torch's default collation, with tensors and arrays stacked straight into the memory that a batch is handed over in.

torch stacks into new memory, in a worker into a new shared file for each batch, and makes a tensor of each array
first. What is not plain numbers of one shape and type goes torch's way, and so do types that the user registered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data._utils.collate import (
    collate,
    collate_numpy_array_fn,
    collate_tensor_fn,
    default_collate_fn_map,
)

from loader.spans import Bytes

Empty = Callable[[int], Bytes]
_TORCHS = {torch.Tensor: collate_tensor_fn, np.ndarray: collate_numpy_array_fn}
_NUMBERS = "biufc"


def default_collate_into(empty: Empty | None, samples: list[Any]) -> Any:
    """What `torch.utils.data.default_collate` makes of the samples, in memory that `empty` gives for a size in
    bytes; in new memory where that is None."""
    stacks: dict[Any, Callable[..., Any]] = {np.ndarray: _arrays(empty or _new)}
    if empty is not None:
        stacks[torch.Tensor] = _tensors(empty)
    mine = {
        kind: stack for kind, stack in stacks.items() if default_collate_fn_map.get(kind) is _TORCHS[kind]
    }
    return collate(samples, collate_fn_map={**default_collate_fn_map, **mine})


def _new(size_bytes: int) -> Bytes:
    return np.empty(size_bytes, np.uint8)


def _tensors(empty: Empty) -> Callable[..., Any]:
    def stack(batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        if {type(each) for each in batch} == {torch.Tensor} and len({each.dtype for each in batch}) == 1:
            try:
                room = torch.from_numpy(empty(len(batch) * first.numel() * first.element_size()))
                return torch.stack(tuple(batch), out=room.view(first.dtype).view(len(batch), *first.shape))
            except (RuntimeError, TypeError):  # of several shapes, sparse, with gradients, not on this device
                pass
        return collate_tensor_fn(batch, collate_fn_map=collate_fn_map)

    return stack


def _arrays(empty: Empty) -> Callable[..., Any]:
    def stack(batch: Sequence[np.ndarray[Any, Any]], *, collate_fn_map: Any = None) -> Any:
        first = batch[0]
        one = len({each.dtype for each in batch}) == len({each.shape for each in batch}) == 1
        if one and first.dtype.kind in _NUMBERS and first.dtype.isnative:
            room = empty(len(batch) * first.nbytes)
            return torch.from_numpy(
                np.stack(batch, out=room.view(first.dtype).reshape(len(batch), *first.shape))
            )
        return collate_numpy_array_fn(batch, collate_fn_map=collate_fn_map)

    return stack
