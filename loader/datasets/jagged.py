"""Samples of uneven size as one tensor: the values back to back, and the offset of each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from cachesvc.core.errors import InvalidInput

_NUMBERS = "biufc"


class Jagged(NamedTuple):
    """A batch of n samples of uneven size, in torch's jagged layout (`torch.nested`).

    `values`: [sum of sizes, ...], uint8 for bytes. `offsets`: int64 [n + 1]; sample i is
    `values[offsets[i]:offsets[i + 1]]`. In int32, `offsets` of tokens are the `cu_seqlens` of variable-length
    attention.
    """

    values: torch.Tensor
    offsets: torch.Tensor

    def unbind(self) -> tuple[torch.Tensor, ...]:
        """Return one view of `values` per sample, as `torchvision.io.decode_jpeg` takes them."""
        views: tuple[torch.Tensor, ...] = self.values.split(self.offsets.diff().tolist())
        return views

    def nested(self) -> torch.Tensor:
        """Return a `torch.nested` tensor of layout `torch.jagged`, without a copy."""
        found: torch.Tensor = torch.nested.nested_tensor_from_jagged(self.values, self.offsets)
        return found


def jagged(samples: Sequence[Any]) -> Jagged:
    """Collate bytes, or arrays or tensors that differ only in their first dimension; also tuples of one such value.
    An absent field counts as empty.

    Samples that stay bytes (`open_dataset(..., decode=None)`) are copied once, from the cache into the batch.
    Raises InvalidInput for samples of another kind.
    """
    if all(type(sample) is tuple and len(sample) == 1 for sample in samples):
        samples = _fill_missing([sample[0] for sample in samples])
    kinds = {type(sample) for sample in samples}
    if kinds <= {bytes, bytearray, memoryview}:
        values = torch.from_numpy(np.frombuffer(bytearray().join(samples), np.uint8))
    elif kinds == {torch.Tensor} and _concatenable(samples):
        values = torch.cat(tuple(samples))
    elif kinds == {np.ndarray} and _concatenable(samples) and samples[0].dtype.kind in _NUMBERS:
        values = torch.from_numpy(np.concatenate(samples))
    else:
        raise InvalidInput(
            "collate_fn=jagged takes bytes, or arrays or tensors of one numeric type that differ only in their first "
            f"dimension, not {', '.join(sorted(kind.__name__ for kind in kinds))}; choose with fields= or "
            "decode=, or use another collate_fn"
        )
    sizes = np.asarray([len(sample) for sample in samples], np.int64)
    return Jagged(values, torch.from_numpy(offsets_of(sizes)))


def offsets_of(sizes: np.ndarray[Any, np.dtype[np.int64]]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the offsets of n parts that lie back to back, and the end of the last: [n + 1]."""
    offsets = np.zeros(len(sizes) + 1, np.int64)
    np.cumsum(sizes, out=offsets[1:])
    return offsets


def _fill_missing(values: list[Any]) -> list[Any]:
    """Replace None by an empty value of the kind that the others are."""
    first = next((value for value in values if value is not None), b"")
    rows = isinstance(first, (np.ndarray, torch.Tensor)) and first.ndim > 0
    nothing = first[:0] if rows else b""
    return [nothing if value is None else value for value in values]


def _concatenable(samples: Sequence[Any]) -> bool:
    """Return whether all have a first dimension, one type, and one shape behind the first dimension."""
    return all(sample.ndim for sample in samples) and len({(s.dtype, s.shape[1:]) for s in samples}) == 1
