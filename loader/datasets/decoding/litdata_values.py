"""Decodes the values of litData's chunks, as its serializers write them. Pickles are refused by the caller."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from cachesvc.core.errors import InvalidInput

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


def decode_nested(raw: bytes) -> Any:
    """Decode litData's binary form of lists and dicts: a tag, and what follows it. See `_nested_dumps` of its
    `streaming/serializers.py`. Raises ValueError, RecursionError for bytes that are no such value."""
    if raw[:1] in (b"[", b"{"):  # of earlier releases
        return json.loads(raw)
    cursor = _Cursor(raw)
    found = _value(cursor)
    if cursor.at != len(raw):
        raise ValueError("something follows it")
    return found


class _Cursor:
    def __init__(self, raw: bytes) -> None:
        self._raw, self.at = raw, 0

    def take(self, count: int) -> bytes:
        if self.at + count > len(self._raw):
            raise ValueError("it ends early")
        self.at += count
        return self._raw[self.at - count : self.at]

    def number(self, form: str) -> Any:
        (found,) = struct.unpack(form, self.take(struct.calcsize(form)))
        return found

    def count(self) -> int:
        found: int = self.number("<I")
        return found

    def text(self) -> str:
        return self.take(self.count()).decode()


def _value(cursor: _Cursor) -> Any:
    return _by_tag(_VALUES, cursor)


def _by_tag(readers: dict[int, Callable[[_Cursor], Any]], cursor: _Cursor) -> Any:
    tag = cursor.take(1)[0]
    if tag not in readers:
        raise ValueError(f"{tag} is no tag of litData")
    return readers[tag](cursor)


def _array(kind: str) -> Callable[[_Cursor], Any]:
    size = np.dtype(kind).itemsize
    return lambda cursor: np.frombuffer(cursor.take(size * cursor.count()), kind).tolist()


def _dict(cursor: _Cursor) -> dict[str, Any]:
    return {cursor.text(): _value(cursor) for _ in range(cursor.count())}


def _records(cursor: _Cursor) -> list[dict[str, Any]]:
    """Dicts that have the same keys, which are written once."""
    rows, names = cursor.count(), cursor.count()
    keys = [cursor.text() for _ in range(names)]
    if not keys:
        raise ValueError("its records have no keys")
    return [{key: _by_tag(_FIELDS, cursor) for key in keys} for _ in range(rows)]


_PLAIN: tuple[Callable[[_Cursor], Any], ...] = (
    _Cursor.text,
    lambda cursor: cursor.number("<q"),
    lambda cursor: cursor.number("<d"),
    lambda cursor: cursor.take(1) != b"\0",
)
_VALUES: dict[int, Callable[[_Cursor], Any]] = {
    0: lambda cursor: json.loads(cursor.take(cursor.count())),
    1: lambda cursor: [cursor.text() for _ in range(cursor.count())],
    2: _array("<i8"),
    3: _array("<f8"),
    4: _array("?"),
    5: _dict,
    6: _records,
    **dict(enumerate(_PLAIN, 7)),
    11: lambda _: None,
}
_FIELDS: dict[int, Callable[[_Cursor], Any]] = {0x10: lambda _: None, **dict(enumerate(_PLAIN, 0x11))}
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
