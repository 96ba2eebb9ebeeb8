"""The dtype that `out=` names, and whether it holds the stored values."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from cachesvc.core.errors import InvalidInput

DType = str | np.dtype[Any] | torch.dtype | type
"""A type of numbers: its name ("uint16"), or numpy's or torch's type."""


def dtype_name(name: str, given: DType | None) -> str:
    """Return the name of a type that was given as the argument `name`; "" for none. Raises InvalidInput."""
    if given is None or isinstance(given, str):
        return given or ""
    if isinstance(given, torch.dtype):
        return str(given).removeprefix("torch.")
    try:
        found: np.dtype[Any] = np.dtype(given)
    except (TypeError, ValueError):
        raise InvalidInput(f"{name}={given!r} is not a type of numbers: give 'uint16', for example") from None
    text = found.base.name if found.base.isnative else found.base.str
    return f"{found.shape}{text}" if found.shape else text


def dtype_named(dtype: str) -> np.dtype[Any]:
    """Return the numpy type of a name. Raises InvalidInput."""
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        raise InvalidInput(f"dtype={dtype!r} is not a numpy type: give 'uint16', for example") from None


def output_dtype(out: str | None) -> np.dtype[Any] | None:
    """Return the dtype that `out` asks for, in native byte order. Raises InvalidInput if tensors do not have it."""
    if not out:
        return None
    try:
        found: np.dtype[Any] = np.dtype(out).newbyteorder("=")
        torch.from_numpy(np.empty(0, found))
    except (TypeError, ValueError, SyntaxError) as error:
        raise InvalidInput(f"out={out!r} is not a type that tensors have") from error
    if found.shape:
        raise InvalidInput(f"out={out!r} has a shape; give the type of one item")
    return found


def check_range(out: np.dtype[Any], values: np.ndarray[Any, Any], uri: str) -> None:
    """Raise InvalidInput for a number that an integer type cannot hold and would change."""
    if out.kind not in "iu" or values.dtype.kind not in "iuf" or np.can_cast(values.dtype, out):
        return
    room = np.iinfo(out)
    for found in (values.min(initial=0).item(), values.max(initial=0).item()):
        if not room.min <= found <= room.max:  # NaN fails this too
            raise InvalidInput(
                f"{uri} holds {found} as {values.dtype}, and out={out.name!r} holds {room.min} to {room.max}: "
                "give a wider out"
            )
