"""Packs of whole documents, by best-fit decreasing (Johnson, "Near-Optimal Bin Packing Algorithms", 1973).

The documents of each extent are placed from the longest to the shortest, each in the fullest pack that has room for it.
An extent has many documents of few lengths, so all documents of one length are placed together, and the time grows with
the number of lengths. A document that is longer than a pack is split: its whole packs stand alone, and the rest is placed
as a document is. Or it is truncated.

A pack has its documents in their own order, and packs are numbered by their first documents. So packs that are read in
sequence go through an extent about once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import numpy as np

from cachesvc.core.order.assignment import I64
from cachesvc.core.order.epoch_order import EpochOrder, Touches
from cachesvc.core.order.packing import Pieces

Overflow = Literal["split", "truncate", "error"]


class WholePacks(NamedTuple):
    """Pack p has the parts [first[p], first[p + 1]) of documents: `length` tokens of document `document[i]` from `begin[i]`
    on, or the document's rest. Extent e has the packs [extent_first[e], extent_first[e + 1])."""

    length: int
    first: I64
    document: I64
    begin: I64
    extent_first: I64

    @property
    def size(self) -> int:
        """The number of packs."""
        return self.first.size - 1


def whole_packs(extent_first: I64, lengths: I64, length: int, overflow: Overflow) -> WholePacks:
    """Pack the documents of each extent. Extent e has the documents [extent_first[e], extent_first[e + 1]), of `lengths`
    tokens. A longer document than `length` is split unless `overflow` is "truncate"."""
    counts = -(-lengths // length)
    if overflow == "truncate":
        counts = np.minimum(counts, 1)
    document = np.repeat(np.arange(lengths.size), counts)
    nth = np.arange(document.size) - np.repeat(np.cumsum(counts) - counts, counts)
    begin = nth * length
    sizes = np.minimum(lengths[document] - begin, length)
    bounds = np.searchsorted(document, extent_first)
    order, firsts, packs = [np.empty(0, np.int64)], [np.zeros(1, np.int64)], [0]
    for low, high in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        pack_of = _packs_in_order(best_fit_decreasing(sizes[low:high], length))
        order.append(low + np.argsort(pack_of, kind="stable"))
        firsts.append(low + np.cumsum(np.bincount(pack_of)))
        packs.append(packs[-1] + firsts[-1].size)
    rows = np.concatenate(order)
    return WholePacks(
        length, np.concatenate(firsts), document[rows], begin[rows], np.asarray(packs, np.int64)
    )


def best_fit_decreasing(sizes: I64, room: int) -> I64:
    """Return the bin of each item. `sizes` are from 1 to `room`, which each bin holds. Equal items keep their order."""
    bin_of = np.empty(sizes.size, np.int64)
    falling = np.argsort(-sizes, kind="stable")
    edges = np.flatnonzero(np.diff(sizes[falling], prepend=-1, append=-1))
    bins = 0
    left: dict[int, I64] = {}
    """The bins that have so much room left."""
    held = 0
    """Bit r is set where bins have room r left."""

    def put(number: I64, rest: int) -> None:
        nonlocal held
        if rest and number.size:
            known = left.get(rest)
            left[rest] = number if known is None else np.concatenate((known, number))
            held |= 1 << rest

    for low, high in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        size = int(sizes[falling[low]])
        while low < high:
            above = held >> size
            if above:
                rest = size + (above & -above).bit_length() - 1
                open_bins = left.pop(rest)
                held ^= 1 << rest
            else:
                rest = room
                count = -(-(high - low) // (room // size))
                open_bins = np.arange(bins, bins + count)
                bins += count
            each = rest // size
            used = min(high - low, open_bins.size * each)
            whole, part = divmod(used, each)
            bin_of[falling[low : low + used]] = np.repeat(open_bins, each)[:used]
            put(open_bins[:whole], rest - each * size)
            put(open_bins[whole : whole + 1] if part else open_bins[:0], rest - part * size)
            put(open_bins[whole + (part > 0) :], rest)
            low += used
    return bin_of


def _packs_in_order(bin_of: I64) -> I64:
    """The bins, numbered by their first items."""
    if not bin_of.size:
        return bin_of
    items = np.arange(bin_of.size)
    first = np.empty(int(bin_of.max()) + 1, np.int64)
    first[bin_of[::-1]] = items[::-1]
    number = np.empty_like(first)
    number[np.argsort(first)] = np.arange(first.size)
    found: I64 = number[bin_of]
    return found


class WholePackRun:
    """The whole packs of one epoch: a pack is a sample, and `order` permutes packs, with the extents of documents."""

    def __init__(self, packs: WholePacks, order: EpochOrder, length_of: Callable[[I64], I64]) -> None:
        self._packs, self._order, self._length_of = packs, order, length_of

    @property
    def size(self) -> int:
        """The number of packs of the epoch."""
        return self._order.samples

    def at(self, positions: I64) -> I64:
        """The packs at ascending positions."""
        return self._order.at(positions)

    def touches(self) -> list[Touches]:
        """The run positions of the extents."""
        return [self._order.touches()]

    def doubtful(self, packs: I64, documents: I64) -> I64:
        """See `PackRun.doubtful`: all rows, since pieces cost little."""
        return np.arange(packs.size)

    def pieces(self, packs: I64) -> Pieces:
        """The pieces of documents that the packs consist of."""
        table = self._packs
        counts = table.first[packs + 1] - table.first[packs]
        row = np.repeat(np.arange(packs.size), counts)
        at = np.arange(row.size) + np.repeat(table.first[packs] - (np.cumsum(counts) - counts), counts)
        document, begin = table.document[at], table.begin[at]
        end = np.minimum(begin + table.length, self._length_of(document))
        return Pieces(row, document, begin, end)
