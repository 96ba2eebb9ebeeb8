"""Encodes lists of numbers with nulls as bytes: the numbers, a bit for each that is set if it is not null, and a mark.

A list without nulls is its numbers alone. Only the mark tells the two apart, so it is 128 random bits.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_MARK = bytes.fromhex("559f53bcc2aafde2e6fd3da6827f48d9")
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def room_bytes(lists: int, numbers: int) -> int:
    """Return the most bytes that `lists` lists with nulls and `numbers` numbers in all take beyond their numbers."""
    return lists * (len(_MARK) + 1) + numbers // 8 if lists else 0


def marked(
    data: Bytes, bounds: npt.NDArray[np.int64], there: npt.NDArray[np.bool_], holed: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], Bytes]:
    """Encode lists; return their begins, their lengths and their bytes.

    `data`: (numbers, width) bytes, 0 for a null. List i is the numbers `bounds[i]` to `bounds[i + 1]`. `there`: for each
    number whether it is not null; `holed`: for each list whether it has nulls.
    """
    width = data.shape[1]
    counts = np.diff(bounds)
    extra = np.where(holed, -(-counts // 8) + len(_MARK), 0)
    lengths = counts * width + extra
    begins = np.cumsum(lengths) - lengths
    out, done, at = np.empty(int(lengths.sum()), np.uint8), 0, 0
    for number in np.flatnonzero(holed).tolist():
        low, high = int(bounds[number]), int(bounds[number + 1])
        plain = data[done:high].reshape(-1)
        tail = np.packbits(there[low:high]).tobytes() + _MARK
        out[at : at + len(plain)] = plain
        at += len(plain) + len(tail)
        out[at - len(tail) : at] = np.frombuffer(tail, np.uint8)
        done = high
    out[at:] = data[done : bounds[-1]].reshape(-1)
    return begins, lengths, out


def numbers_of(raw: bytes, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Decode a list: a read-only array of numbers, or an array of objects with None for each null if it has nulls."""
    body = len(raw) - len(_MARK)
    count = 8 * body // (8 * dtype.itemsize + 1)
    bits = -(-count // 8)
    if not raw.endswith(_MARK) or count < 1 or count * dtype.itemsize + bits != body:
        return np.frombuffer(raw, dtype)
    there = np.unpackbits(np.frombuffer(raw, np.uint8, bits, body - bits), count=count)
    found = np.frombuffer(raw, dtype, count).astype(object)
    found[there == 0] = None
    return found
