"""The form of fixed-size records, as far as a device needs it to make batches of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from loader.datasets.targets import Targets


@dataclass(frozen=True, slots=True)
class RecordForm:
    """Records of `record_bytes` at multiples of `stride_bytes`, arrays of `stored` and `shape`. `out` is the type of
    batches, None where it is `stored`."""

    record_bytes: int
    stride_bytes: int
    stored: torch.dtype
    shape: tuple[int, ...]
    out: torch.dtype | None
    targets: Targets | None


def torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's type of the same bytes; None if there is none."""
    if not dtype.isnative:
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        return None
