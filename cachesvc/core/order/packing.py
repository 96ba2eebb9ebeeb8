"""Packing: documents joined end to end and cut into packs of one length.

The documents of an epoch come in the order of `EpochOrder`: extents permuted, documents permuted within windows of extents.
Their tokens are one stream, and pack p is tokens [p * length, (p + 1) * length) of it: a document that does not fit goes
on in the next pack. So every epoch has floor(tokens / length) packs, each token is in at most one, and fewer than `length`
tokens at the end of the stream are left out, others in each epoch.

The number of a window's tokens is known from the totals of its extents. So a seek to any pack reads the documents of one
window only (two where the pack spans them): memory O(documents of a window).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cachesvc.core.order.assignment import I64
from cachesvc.core.order.epoch_order import EpochOrder, Touches
from cachesvc.core.order.permute import distinct
from cachesvc.core.order.recent import Latest

_BLOCKS_KEPT = 4


class Pieces(NamedTuple):
    """Pack `row[i]` of the request holds tokens [begin[i], end[i]) of document `document[i]`, in this order. int64[n]
    each."""

    row: I64
    document: I64
    begin: I64
    end: I64


class _Block(NamedTuple):
    """The documents of a window in the order of the stream, and where each begins and ends in it."""

    document: I64
    begin: I64
    end: I64


class PackRun:
    """The packs of one epoch of documents. `documents` is their order, with one canonical node, batches of 1 and a run that
    is not rotated; `length_of` gives their lengths in tokens; `extent_tokens[i]` is the sum of the lengths in extent i.
    `planned`: its extents are the dataset's, so the packs have a plan."""

    def __init__(
        self,
        documents: EpochOrder,
        length_of: Callable[[I64], I64],
        extent_tokens: I64,
        length: int,
        planned: bool = True,
    ) -> None:
        self._documents, self._length_of, self._length = documents, length_of, length
        self._planned = planned
        totals = np.concatenate(([0], np.cumsum(extent_tokens[documents.run.extents])))
        self._block_tokens = totals[np.searchsorted(documents.run.first, documents.block_first)]
        self._blocks: Latest[int, _Block] = Latest(_BLOCKS_KEPT)

    @property
    def size(self) -> int:
        """The number of packs of the epoch."""
        return int(self._block_tokens[-1]) // self._length

    def at(self, positions: I64) -> I64:
        """The packs at ascending positions: a pack's number is its position."""
        return positions

    def touches(self) -> list[Touches]:
        """The run positions of the extents; none where they are not the dataset's."""
        if not self._planned:
            return [Touches(*(np.empty(0, np.int64) for _ in range(3)))]
        extent, begin, end = self._documents.touches()
        first = self._tokens_before(begin) // self._length
        last = -(-self._tokens_before(end) // self._length)
        return [Touches(extent, first, np.minimum(last, self.size))]

    def pieces(self, packs: I64) -> Pieces:
        """The pieces of documents that the packs consist of."""
        first, last = packs * self._length, (packs + 1) * self._length
        low, high = self._blocks_of(packs)
        base = self._block_tokens.size
        spans = [divmod(span, base) for span in distinct(low * base + high).tolist()]
        blocks = sorted({block for start, stop in spans for block in range(start, stop)})
        cuts = [self._cut(self._blocks.get(block, self._block), first, last) for block in blocks]
        if not cuts:
            return Pieces(*(np.empty(0, np.int64) for _ in range(4)))
        if len(cuts) == 1:
            return cuts[0]
        pieces = Pieces(*(np.concatenate(column) for column in zip(*cuts, strict=True)))
        order = np.argsort(pieces.row, kind="stable")  # a pack that spans two windows has pieces of both
        return Pieces(*(column[order] for column in pieces))

    def doubtful(self, packs: I64, documents: I64) -> I64:
        """The rows of `packs` that may consist of some `documents` alone: their windows have enough tokens of these."""
        order, entry = self._documents, np.zeros(self._documents.extent_first.size - 1, np.int64)
        entry[order.run.extents] = np.arange(order.run.extents.size)
        extent = np.searchsorted(order.extent_first, documents, "right") - 1
        positions = documents - order.extent_first[extent] + order.run.begins[entry[extent]]
        blocks = np.searchsorted(order.block_first, positions, "right") - 1
        tokens = np.bincount(blocks, self._length_of(documents), self._block_tokens.size - 1).astype(np.int64)
        before = np.concatenate(([0], np.cumsum(tokens)))
        low, high = self._blocks_of(packs)
        return np.flatnonzero(before[high] - before[low] >= self._length)

    def _blocks_of(self, packs: I64) -> tuple[I64, I64]:
        """The windows [low[i], high[i]) in which packs have tokens."""
        low = np.searchsorted(self._block_tokens, packs * self._length, "right") - 1
        return low, np.searchsorted(self._block_tokens, (packs + 1) * self._length, "left")

    def _cut(self, block: _Block, first: I64, last: I64) -> Pieces:
        """The parts of a window's documents within [first[i], last[i]) of the stream."""
        low = np.searchsorted(block.end, first, "right")
        counts = np.maximum(np.searchsorted(block.begin, last, "left") - low, 0)
        ends = np.cumsum(counts)
        row = np.repeat(np.arange(first.size), counts)
        at = np.arange(row.size) + np.repeat(low - (ends - counts), counts)
        start, size = block.begin[at], block.end[at] - block.begin[at]
        # A pack cuts its first document and its last one at most.
        begin, end, some = np.zeros_like(at), size.copy(), counts > 0
        heads, tails = (ends - counts)[some], ends[some] - 1
        begin[heads] = np.maximum(first[some] - start[heads], 0)
        end[tails] = np.minimum(size[tails], last[some] - start[tails])
        pieces = Pieces(row, block.document[at], begin, end)
        held = size > 0
        return pieces if held.all() else Pieces(*(column[held] for column in pieces))

    def _block(self, block: int) -> _Block:
        first, last = self._documents.block_first[block : block + 2].tolist()
        documents = self._documents.at(np.arange(first, last, dtype=np.int64))
        ends = self._block_tokens[block] + np.cumsum(self._length_of(documents))
        begins = np.concatenate((self._block_tokens[block : block + 1], ends[:-1]))
        return _Block(documents, begins, ends)

    def _tokens_before(self, positions: I64) -> I64:
        """Tokens before positions at which blocks begin."""
        return self._block_tokens[np.searchsorted(self._documents.block_first, positions)]
