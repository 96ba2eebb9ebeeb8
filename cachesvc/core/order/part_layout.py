"""The layout of a part of a dataset, over which its order is made."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cachesvc.core.order.permute import I64


def subset_first(extent_first: I64, ids: I64) -> I64:
    """`extent_first` of a subset, int64[E+1]. `ids` are its sample ids, ascending and distinct."""
    return np.searchsorted(ids, extent_first).astype(np.int64)


class PartLayout(NamedTuple):
    """The order of a part of a dataset: the first ordinal of each extent, int64[E+1], and the index of each ordinal, None
    where they are equal. Without `extents_known` all samples count as one extent."""

    extent_first: I64
    index_of: I64 | None
    extents_known: bool = True


def part_layout(extent_first: I64, ids: I64 | None, shuffle: bool) -> PartLayout:
    """The layout of the samples `ids` of a dataset, in the order of their indices; None for all."""
    if ids is None:
        return PartLayout(extent_first, None)
    if not (ids[1:] < ids[:-1]).any():
        return PartLayout(subset_first(extent_first, ids), None)
    if not shuffle:
        return PartLayout(np.array([0, ids.size], np.int64), None, False)
    index_of = np.argsort(ids, kind="stable")
    return PartLayout(subset_first(extent_first, ids[index_of]), index_of)
