"""Random parts of a dataset: a pure function of its size, the fractions and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from cachesvc.core.order.permute import I64, permute


def random_parts(count: int, fractions: Sequence[float], seed: int) -> list[I64]:
    """Disjoint parts of [0, count), one for each fraction, each ascending. Fractions sum to 1 at most."""
    shuffled = permute(np.arange(count), max(1, count), seed).astype(np.int64)
    bounds = [round(share * count) for share in np.cumsum([0.0, *fractions]).tolist()]
    return [np.sort(shuffled[low:high]) for low, high in pairwise(bounds)]
