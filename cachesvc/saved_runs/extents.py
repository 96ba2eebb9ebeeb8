"""Finds the extents that hold samples, or ranges of addresses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.layout import Columns, Indirect
from cachesvc.core.order.intervals import Intervals


def extents_of(catalog: Catalog, samples: Ints) -> Ints:
    """The extents of samples, ascending, with those into which samples continue."""
    begin = np.searchsorted(catalog.extent_first, samples, side="right") - 1
    if isinstance(catalog.layout, (Columns, Indirect)) or not samples.size:
        return np.unique(begin)
    addresses, lengths = catalog.locate(samples)
    held = lengths > 0
    low, high = addresses[held], addresses[held] + lengths[held]
    return np.unique(np.concatenate([begin, extents_between(catalog, low, high)]))


def extents_between(catalog: Catalog, begin: Ints, end: Ints) -> Ints:
    """The extents with bytes of the ranges [begin[i], end[i]), none of them empty, of the address space, ascending."""
    return np.unique(cut(Intervals(catalog.extent_starts), begin, end)[0])


def cut(extents: Intervals, begin: Ints, end: Ints) -> Sequence[Ints]:
    """Cut the ranges [begin[i], end[i]), none of them empty, where extents begin. Return extents, begins and ends, in any
    sequence."""
    extent = extents.of(begin)
    stop = extents.end_of(extent)
    long = np.flatnonzero(end > stop)
    if not long.size:
        return extent, begin, end
    parts, rests = (extent, begin, np.minimum(end, stop)), cut(extents, stop[long], end[long])
    return [np.concatenate(each) for each in zip(parts, rests, strict=True)]
