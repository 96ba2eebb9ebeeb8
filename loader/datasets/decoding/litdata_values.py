"""Decodes the values of litData's chunks, as its serializers write them. Pickles are refused by the caller."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cachesvc.core.errors import InvalidInput
from loader.datasets.decoding.litdata_nested import decode_nested

_TORCH = (
    *(torch.float32, torch.float32, torch.float64, torch.float64),
    *(torch.complex64, torch.complex64, torch.complex128, torch.complex128),
    *(torch.float16, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int16),
    *(torch.int32, torch.int32, torch.int64, torch.int64, torch.bool, torch.uint16),
)
_NUMPY = ("i1", "<i2", "<i4", "<i8", "u1", "<u2", "<u4", "<u8", "<f2", "<f4", "<f8", "<c8", "<c16", "?")
"""Types by litData's numbers."""


def value_decoder(name: str, kind: str) -> Callable[[bytes], Any] | None:
    """Return the decoder of a field of litData's type `kind`; None for a type that stays bytes. Raises InvalidInput for
    types whose numbers are not known."""
    base, _, number = kind.partition(":")
    if base in ("no_header_tensor", "no_header_numpy"):
        types: tuple[Any, ...] = _TORCH if base == "no_header_tensor" else _NUMPY
        if not number.isdecimal() or int(number) >= len(types):
            raise InvalidInput(f"field {name!r} is of litData's type {kind!r}, which is not known here")
        dtype = types[int(number)]
        if base == "no_header_numpy":
            return lambda raw: np.frombuffer(raw, dtype).copy()
        return lambda raw: _tensor(raw, dtype, (-1,))
    return _DECODERS.get(base)


def _tensor(raw: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not raw:
        return torch.empty([max(0, side) for side in shape], dtype=dtype)
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(shape)


def _shaped_tensor(raw: bytes) -> torch.Tensor:
    """Decode the number of the type, the number of dimensions, and these, in u32 of the big end first; then the values."""
    number, rank = struct.unpack_from(">II", raw)
    shape = struct.unpack_from(f">{rank}I", raw, 8)
    return _tensor(raw[8 + 4 * rank :], _TORCH[number], shape)


def _shaped_array(raw: bytes) -> Any:
    """Decode as `_shaped_tensor`, in u32 of the little end first."""
    number, rank = struct.unpack_from("<II", raw)
    shape = struct.unpack_from(f"<{rank}I", raw, 8)
    return np.frombuffer(raw, _NUMPY[number], offset=8 + 4 * rank).reshape(shape).copy()


_DECODERS: dict[str, Callable[[bytes], Any]] = {
    "str": bytes.decode,
    "text": bytes.decode,
    "bool": lambda raw: raw[0] != 0,
    "int": lambda raw: struct.unpack("<q", raw)[0],
    "float": lambda raw: struct.unpack("<d", raw)[0],
    "numpy": _shaped_array,
    "tensor": _shaped_tensor,
    "json": decode_nested,
}
