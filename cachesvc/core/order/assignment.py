"""Assigns the positions of a run to steps, slots and canonical nodes: the part of the order that no dataset changes.

A run is cut into global batches of G slots. Canonical node c of C owns the slots [cG/C, (c+1)G/C) of every full batch, and
one contiguous part of the run. The tail of N mod G positions comes last. Steps that are skipped keep their positions, which
no batch then has: every other batch is the same as without them.

Where each canonical node has its own samples for the whole run, the tail has no part of its own. What the full batches
leave of each node's part fills slots of that node in the last batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.skipped import NONE_SKIPPED, Skipped

I64 = npt.NDArray[np.int64]


class TouchedSteps(NamedTuple):
    """Interval `row[i]` of the request is touched from `first_step[i]` to `last_step[i]`, both included. Three int64[n]."""

    row: I64
    first_step: I64
    last_step: I64


class PartialBatch(NamedTuple):
    """Positions of one rank's micro-batches of the partial batch, int64[batches, rows]. The first `valid[i]` of row i are
    real, int64[batches]; the others are repeats."""

    positions: I64
    valid: I64


class Places(NamedTuple):
    """Slot i of full batch b lies at `base[i] + b * width[i]` of the run. Two int64[slots]."""

    base: I64
    width: I64


class _Part(NamedTuple):
    """The slots [low, high) of one canonical node: run position = base + step * width + slot."""

    base: int
    width: int
    low: int
    high: int


class Assignment:
    """Assigns `size` positions to batches of `batch` slots over `nodes` canonical nodes. `last`: as in `OrderSpec`.
    `skipped`: data steps without a batch. `by_node`: the parts of the nodes are all there is, without one for the tail.
    Raises `InvalidInput` when `last` is `error` and positions are left over.

    `full_steps` batches are full. `steps` counts the partial one at the end too, unless it is dropped (not `has_tail`).
    Both count the kept steps, and so do all arguments and results that are steps. `data_steps` counts all.
    """

    def __init__(
        self,
        size: int,
        batch: int,
        nodes: int,
        last: str,
        skipped: Skipped = NONE_SKIPPED,
        by_node: bool = False,
    ) -> None:
        self.size, self.batch, self._nodes, self._last, self.skipped = size, batch, nodes, last, skipped
        self._by_node = by_node
        self._all_full, self.tail_size = divmod(size, batch)
        self.data_steps = self._all_full + (self.tail_size > 0 and last != "drop")
        self.has_tail = self.data_steps > self._all_full and self._all_full not in skipped
        self.full_steps = skipped.number(self._all_full) if skipped else self._all_full
        self.steps = self.full_steps + self.has_tail
        if last == "error" and self.tail_size:
            raise InvalidInput(
                f"{size} samples leave {self.tail_size} over in global batches of {batch}: choose last='drop' or 'short',"
                " or another batch size"
            )

    def regions(self) -> Iterator[tuple[int, int]]:
        """The part of the run of each canonical node as (begin, end), then the tail. `by_node`: each node's part of the
        full batches, and then its part of the tail."""
        for node in range(self._nodes):
            begin, width = self._begin(node), self._slot(node + 1) - self._slot(node)
            yield begin, begin + self._all_full * width
            if self._by_node:
                yield begin + self._all_full * width, self._begin(node + 1)
        if not self._by_node:
            yield self._all_full * self.batch, self.size

    @property
    def bounds(self) -> I64:
        """The first position of each canonical node's part, and the end of the last one: [nodes + 1]."""
        return np.array([self._begin(node) for node in range(self._nodes + 1)], np.int64)

    def nodes_of(self, low: int, high: int) -> range:
        """The canonical nodes that have some of the slots [low, high), of which there are some."""
        # floor(cG/C) <= slot first holds for c = ceil((slot + 1) * C / G) - 1
        first, last = (((slot + 1) * self._nodes - 1) // self.batch for slot in (low, high - 1))
        return range(first, last + 1)

    def _slot(self, node: int) -> int:
        """The first slot of a canonical node."""
        return node * self.batch // self._nodes

    def _begin(self, node: int) -> int:
        """The first position of a canonical node. `by_node`: all samples are shared out by slots, so that a node has
        between none and a batch's part more than its full batches need."""
        slot = self._slot(node)
        return self.size * slot // self.batch if self._by_node else self._all_full * slot

    def slots(self, at: Callable[[I64], I64], first_step: int, last_step: int, low: int, high: int) -> I64:
        """Values of `at` for the positions in the slots [low, high) of the full batches [first_step, last_step):
        int64[steps, slots]. It gets ascending positions, those of each canonical node in turn."""
        assert 0 <= first_step <= last_step <= self.full_steps
        assert 0 <= low <= high <= self.batch
        steps = self.skipped.steps(np.arange(first_step, last_step, dtype=np.int64))[:, None]
        columns: list[I64] = [np.empty((last_step - first_step, 0), np.int64)]
        for part in self._parts(low, high):
            positions = part.base + steps * part.width + np.arange(part.low, part.high, dtype=np.int64)
            columns.append(at(positions.reshape(-1)).reshape(positions.shape))
        return np.concatenate(columns, axis=1)

    def places(self, low: int, high: int) -> Places:
        """The positions of the slots [low, high) of every full batch, skipped ones included."""
        base, width = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
        for part in self._parts(low, high):
            base.append(part.base + np.arange(part.low, part.high, dtype=np.int64))
            width.append(np.full(part.high - part.low, part.width, np.int64))
        return Places(np.concatenate(base), np.concatenate(width))

    def tail(self, low: int, high: int, batches: int) -> PartialBatch:
        """The slots [low, high) of the partial batch, in `batches` micro-batches of `(high - low) / batches` slots. All
        micro-batches of all ranks have the same number of rows: one for each slot under `pad`, else as few as hold the
        real samples. The real samples fill the first rows of the batch, repeats the last; `by_node`, of each
        micro-batch."""
        assert self.has_tail
        each = (high - low) // batches
        assert 0 < each * batches == high - low
        assert low % each == self.batch % each == 0
        if self._by_node:
            return self._tail_by_node(low, each, batches)
        rows = each if self._last == "pad" else -(-self.tail_size * each // self.batch)
        first, start = low // each * rows, self._all_full * self.batch
        row = np.arange(first, first + batches * rows, dtype=np.int64).reshape(batches, rows)
        # repeats go backwards from the beginning of the tail: these extents were touched last, so a cache has them
        repeats = (start - 1 - (row - self.tail_size)) % self.size
        if self.skipped:  # they may be skipped samples, and the tail has none
            repeats = start + row % self.tail_size
        valid = np.clip(self.tail_size - row[:, 0], 0, rows)
        return PartialBatch(np.where(row < self.tail_size, start + row, repeats), valid)

    def _tail_by_node(self, low: int, each: int, batches: int) -> PartialBatch:
        """`tail` of micro-batches of `each` slots. A micro-batch has the real samples of its own slots."""
        slots, positions = self._leftovers()
        counts = np.bincount(slots // each, minlength=self.batch // each)
        rows = np.arange(each if self._last == "pad" else int(counts.max()))
        slot = low + each * np.arange(batches)
        valid, number = counts[slot // each], np.searchsorted(slots, slot)[:, None] + rows
        real = positions[np.minimum(number, positions.size - 1)]
        if self.skipped:  # other repeats may be skipped samples, and the tail has none
            repeats = positions[number % positions.size]
        else:
            repeats = np.stack([self._repeats(int(first), rows) for first in slot])
        return PartialBatch(np.where(rows < valid[:, None], real, repeats), valid)

    def _repeats(self, slot: int, rows: I64) -> I64:
        """Positions of the canonical node of a slot, backwards from the end of its full batches."""
        (node,) = self.nodes_of(slot, slot + 1)
        first, begin, end = self._slot(node), self._begin(node), self._begin(node + 1)
        if begin == end:
            return rows % self.size
        last = self._all_full * (self._slot(node + 1) - first) - 1
        return begin + (last - (slot - first) - rows) % (end - begin)

    def _leftovers(self) -> tuple[I64, I64]:
        """`by_node`: the slots of the last batch that are real, ascending, and their positions."""
        slots, positions = [], []
        for node in range(self._nodes):
            first, width = self._slot(node), self._slot(node + 1) - self._slot(node)
            begin, end = self._begin(node) + self._all_full * width, self._begin(node + 1)
            left = np.arange(end - begin, dtype=np.int64)
            slots.append(first + left * width // max(1, left.size))
            positions.append(begin + left)
        return np.concatenate(slots), np.concatenate(positions)

    def touched(self, begin: I64, end: I64, low: int, high: int, batches: int) -> TouchedSteps:
        """The steps in which a rank with the slots [low, high) touches each of the intervals [begin[i], end[i]) of the run.

        An interval occurs once for each canonical node of the rank, and once more in the partial batch, which is cut into
        `batches` micro-batches.
        """
        rows = np.arange(begin.size, dtype=np.int64)
        parts = [self._kept(self._within(part, rows, begin, end)) for part in self._parts(low, high)]
        if self.has_tail:
            positions = np.sort(self.tail(low, high, batches).positions, axis=None)
            held = rows[np.searchsorted(positions, begin) < np.searchsorted(positions, end)]
            step = np.full(held.size, self.full_steps, np.int64)
            parts.append(TouchedSteps(held, step, step))
        if not parts:
            return TouchedSteps(*(np.empty(0, np.int64) for _ in range(3)))
        return TouchedSteps(*(np.concatenate(column) for column in zip(*parts, strict=True)))

    def place(self, position: int) -> tuple[int, int] | None:
        """The data step of a position of the run, and its slot there; its row, in the partial batch. None where the tail is
        dropped. Skipped steps have places too."""
        first = 0
        for part in self._parts(0, self.batch):
            if part.base <= position < part.base + self._all_full * part.width:
                step, slot = divmod(position - part.base, part.width)
                return step, first + slot
            first += part.width
        if self.data_steps == self._all_full:
            return None
        if not self._by_node:
            return self._all_full, position - self._all_full * self.batch
        return self._all_full, int(np.searchsorted(self._leftovers()[1], position))

    def _kept(self, touched: TouchedSteps) -> TouchedSteps:
        """Count kept steps in place of all, without rows that only skipped steps touch."""
        if not self.skipped:
            return touched
        first, after = self.skipped.numbers(touched.first_step), self.skipped.numbers(touched.last_step + 1)
        held = first < after
        return TouchedSteps(touched.row[held], first[held], after[held] - 1)

    def _within(self, part: _Part, rows: I64, begin: I64, end: I64) -> TouchedSteps:
        begin = np.maximum(begin, part.base) - part.base
        end = np.minimum(end - part.base, self._all_full * part.width)
        first_step = np.maximum(begin - part.high, -part.width) // part.width + 1
        last_step = np.minimum((end - 1 - part.low) // part.width, self._all_full - 1)
        held = (first_step <= last_step) & (begin < end)
        return TouchedSteps(rows[held], first_step[held], last_step[held])

    def _parts(self, low: int, high: int) -> Iterator[_Part]:
        """The slots [low, high), cut at the canonical nodes that hold them."""
        for node in self.nodes_of(low, high) if low < high else ():
            start, stop = self._slot(node), self._slot(node + 1)
            yield _Part(self._begin(node), stop - start, max(low, start) - start, min(high, stop) - start)
