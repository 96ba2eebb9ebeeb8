"""Positions of a run, dealt to steps, slots and canonical nodes: the part of the order that no dataset changes.

A run is cut into global batches of G slots. Canonical node c of C owns the slots [cG/C, (c+1)G/C) of every full
batch, and one contiguous part of the run; the tail of N mod G positions comes last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import InvalidInput

I64 = npt.NDArray[np.int64]


class Steps(NamedTuple):
    """Interval `row[i]` of those asked for is touched from `first_step[i]` to `last_step[i]`, both included."""

    row: I64
    first_step: I64
    last_step: I64


class _Part(NamedTuple):
    """Slots [low, high) as they lie in one canonical node: run position = base + step * width + slot."""

    base: int
    width: int
    low: int
    high: int


class Deal:
    """Deals `size` positions into batches of `batch` slots over `nodes` canonical nodes. `last`: as in
    `OrderSpec`. Raises `InvalidInput` when that is `error` and positions are left over.

    `full_steps` batches are full. `steps` counts the partial one at the end too, unless it is dropped (not `has_tail`).
    """

    def __init__(self, size: int, batch: int, nodes: int, last: str) -> None:
        self.size, self.batch, self._nodes, self._last = size, batch, nodes, last
        self.full_steps, self.tail_size = divmod(size, batch)
        self.has_tail = self.tail_size > 0 and last != "drop"
        self.steps = self.full_steps + self.has_tail
        if last == "error" and self.tail_size:
            raise InvalidInput(
                f"{size} samples leave {self.tail_size} over in global batches of {batch}: choose last='drop' or 'pad',"
                " or another batch size"
            )

    def regions(self) -> Iterator[tuple[int, int]]:
        """The part of the run of each canonical node, then the tail's."""
        for node in range(self._nodes):
            first, end = node * self.batch // self._nodes, (node + 1) * self.batch // self._nodes
            yield self.full_steps * first, self.full_steps * end
        yield self.full_steps * self.batch, self.size

    def slots(self, at: Callable[[I64], I64], first_step: int, last_step: int, low: int, high: int) -> I64:
        """What `at` says of the positions in the slots [low, high) of the full batches [first_step, last_step):
        int64[steps, slots]. It is asked of ascending positions, those of each canonical node in turn."""
        assert 0 <= first_step <= last_step <= self.full_steps
        assert 0 <= low <= high <= self.batch
        steps = np.arange(first_step, last_step, dtype=np.int64)[:, None]
        found: list[I64] = [np.empty((last_step - first_step, 0), np.int64)]
        for part in self._parts(low, high):
            positions = part.base + steps * part.width + np.arange(part.low, part.high, dtype=np.int64)
            found.append(at(positions.reshape(-1)).reshape(positions.shape))
        return np.concatenate(found, axis=1)

    def tail(self, low: int, high: int) -> tuple[I64, I64]:
        """Positions of the real samples and of the repeats in the slots [low, high) of the partial batch. Raises
        `InvalidInput` for a part of a `short` batch."""
        assert self.has_tail
        assert 0 <= low <= high <= self.batch
        if self._last == "short" and (low, high) != (0, self.batch):
            raise InvalidInput(
                f"a short last batch of {self.tail_size} samples cannot be shared by several ranks:"
                " choose last='pad' or 'drop'"
            )
        first, end = low * self.tail_size // self.batch, high * self.tail_size // self.batch
        start = self.full_steps * self.batch
        real = start + np.arange(first, end, dtype=np.int64)
        if self._last == "short":
            return real, real[:0]
        # repeats go backwards from the tail's beginning: these extents were touched last, so a cache has them
        repeats = start - 1 - np.arange(low - first, high - end, dtype=np.int64)
        return real, repeats % self.size

    def touched(self, begin: I64, end: I64, low: int, high: int) -> Steps:
        """When a rank with the slots [low, high) is inside each of the intervals [begin[i], end[i]) of the run.

        An interval occurs once for each canonical node of the rank, and once more in the partial batch.
        """
        rows = np.arange(begin.size, dtype=np.int64)
        found = [self._within(part, rows, begin, end) for part in self._parts(low, high)]
        if self.has_tail:
            positions = np.sort(np.concatenate(self.tail(low, high)))
            held = rows[np.searchsorted(positions, begin) < np.searchsorted(positions, end)]
            step = np.full(held.size, self.full_steps, np.int64)
            found.append(Steps(held, step, step))
        if not found:
            return Steps(*(np.empty(0, np.int64) for _ in range(3)))
        return Steps(*(np.concatenate(column) for column in zip(*found, strict=True)))

    def _within(self, part: _Part, rows: I64, begin: I64, end: I64) -> Steps:
        begin = np.maximum(begin, part.base) - part.base
        end = np.minimum(end - part.base, self.full_steps * part.width)
        first_step = np.maximum(begin - part.high, -part.width) // part.width + 1
        last_step = np.minimum((end - 1 - part.low) // part.width, self.full_steps - 1)
        held = (first_step <= last_step) & (begin < end)
        return Steps(rows[held], first_step[held], last_step[held])

    def _parts(self, low: int, high: int) -> Iterator[_Part]:
        """The slots [low, high), cut at the canonical nodes that hold them."""
        batch, nodes = self.batch, self._nodes
        # floor(cG/C) <= slot first holds for c = ceil((slot + 1) * C / G) - 1
        for node in range(((low + 1) * nodes - 1) // batch, nodes):
            start, stop = node * batch // nodes, (node + 1) * batch // nodes
            if start >= high or low == high:
                return
            yield _Part(
                start * self.full_steps, stop - start, max(low, start) - start, min(high, stop) - start
            )
