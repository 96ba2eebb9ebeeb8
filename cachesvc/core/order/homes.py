"""The extents of each canonical node, where these keep their extents for a whole run: `shuffle_scope="node"`.

The extents are permuted once for the run, by its seed, and the sequence is cut into a part for each canonical node. All
parts have the same number of samples for each slot of a global batch, so a part may begin within an extent. Such an
extent is two pieces, one of each node.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from cachesvc.core.order.permute import I64, Use, mix, permute


class Homes(NamedTuple):
    """Piece k has the samples [first[k], first[k+1]) of the extent `extent[k]`. `of_node`: the pieces of each node."""

    first: I64
    extent: I64
    of_node: list[I64]


def homes(extent_first: I64, seed: int, bounds: I64) -> Homes:
    """Give canonical node c the places [bounds[c], bounds[c+1]) of the permuted extents, in samples."""
    sizes = np.diff(extent_first)
    held = np.flatnonzero(sizes)
    if held.size:
        held = held[permute(np.arange(held.size), held.size, mix(Use.HOMES, seed)).astype(np.int64)]
    place = np.zeros(sizes.size, np.int64)
    ends = np.cumsum(sizes[held])
    place[held] = ends - sizes[held]
    cuts = bounds[1:-1]
    cuts = cuts[cuts < (ends[-1] if ends.size else 0)]
    cut = held[np.searchsorted(ends, cuts, side="right")]
    first = np.unique(np.concatenate((extent_first, extent_first[cut] + cuts - place[cut])))
    extent = np.searchsorted(extent_first, first[:-1], side="right") - 1
    at = place[extent] + first[:-1] - extent_first[extent]
    order = np.argsort(at)
    return Homes(first, extent, np.split(order, np.searchsorted(at[order], bounds[1:-1])))
