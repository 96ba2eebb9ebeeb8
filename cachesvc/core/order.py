"""The sample order: a pure function of (seed, epoch, position). Design, D6.

    positions            the order: 0 .. N-1, cut into global batches of G slots
       | dealt           canonical node c of C owns the slots [cG/C, (c+1)G/C) of every full batch
    run positions        one contiguous part of the run for each canonical node, then the tail of N mod G
       | permuted        within blocks of `window_extents` extents, each block by its own key
    run                  the extents, permuted whole, their samples laid end to end
       | shifted         a run position lies in one extent
    samples              ids in dataset order

What holds, for every spec:
- *exactly once*: the full batches and the tail together name each sample once (`pad` adds repeats, which are
  not counted as valid; `drop` leaves the tail out);
- *elastic*: a global batch depends on the spec and the epoch only. Rank r of R takes the slots
  [rG/R, (r+1)G/R), so any number of ranks, workers or restarts sees the same global batches;
- *local*: canonical node c touches only its own part of the run, a block of extents at a time;
- *independent*: epochs and seeds have unrelated orders;
- *cheap*: memory O(extents), construction O(extents log extents), seek to any step O(log extents). A full
  global shuffle is the same function with one canonical node and one block.

Unshuffled, the run is the dataset itself and global batch b is the samples [bG, (b+1)G).

A subset is an order over its own ordinals: give `subset_first(extent_first, ids)` as `extent_first` and
look the resulting ordinals up in `ids`. Extents without samples take no part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from cachesvc.core.errors import InvalidInput
from cachesvc.core.permute import MAX_SIZE, U64, mix, mix_each, permute, permute_groups

I64 = npt.NDArray[np.int64]
Last = Literal["drop", "pad", "error", "short"]

_GROUPED_BELOW = 2048
"""Blocks with fewer positions than this in one request are permuted together: a call costs about 100 us."""


class _Use(IntEnum):
    """What a key is for, so that equal numbers never give equal keys."""

    EXTENTS = 1
    BLOCK = 2
    SAMPLE = 3


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """Everything but the epoch that the order depends on; a run records it and keeps it.

    `window_extents` 0 means everything. `last` says what becomes of N mod G samples: `drop` them, `pad` the
    batch to G with repeats, `error` (refuse), or a `short` batch (one rank only).
    Raises `InvalidInput` for numbers that make no order.
    """

    seed: int
    global_batch: int
    window_extents: int = 0
    canonical_nodes: int = 1
    shuffle: bool = True
    last: Last = "drop"

    def __post_init__(self) -> None:
        if self.global_batch < 1:
            raise InvalidInput(f"a global batch of {self.global_batch} samples: give 1 or more")
        if self.window_extents < 0:
            raise InvalidInput(
                f"a window of {self.window_extents} extents: give 1 or more, or 0 for everything"
            )
        if not 1 <= self.canonical_nodes <= self.global_batch:
            raise InvalidInput(
                f"{self.canonical_nodes} canonical nodes for a global batch of {self.global_batch}:"
                " give from 1 to the global batch"
            )
        if not 0 <= self.seed < 1 << 64:
            raise InvalidInput(f"seed {self.seed}: give from 0 to 2^64 - 1")
        if self.last not in get_args(Last):
            raise InvalidInput(f"last={self.last!r}: give one of {', '.join(get_args(Last))}")


class Tail(NamedTuple):
    """One rank's part of the last, partial batch: the first `valid` samples are real, the rest repeats."""

    samples: I64
    valid: int


class Plan(NamedTuple):
    """What one rank touches: `extent[i]` from step `first_step[i]` to `last_step[i]`, both included.

    Sorted by first step. An extent occurs again where it is touched in another part of the order. `following`:
    the extents in the order of the epoch after this one, where the caller knows that there is one.
    """

    extent: I64
    first_step: I64
    last_step: I64
    following: I64 | None = None


class _Part(NamedTuple):
    """Slots [low, high) as they lie in one canonical node: run position = base + step * width + slot."""

    base: int
    width: int
    low: int
    high: int


def sample_key(seed: int, epoch: int, sample: int) -> int:
    """The 64-bit key of the generator that a transform of this sample draws from in this epoch."""
    return mix(_Use.SAMPLE, seed, epoch, sample)


def subset_first(extent_first: I64, ids: I64) -> I64:
    """`extent_first` of a subset: `ids` are its sample ids, ascending and distinct. int64[E+1]."""
    return np.searchsorted(ids, extent_first).astype(np.int64)


class EpochOrder:
    """The order of one epoch. Immutable; safe to share between threads and to send to workers.

    `extent_first[i]` is the first sample of extent i, int64[E+1] with the number of samples at the end.
    Raises `InvalidInput` when `last` is `error` and samples are left over.
    """

    def __init__(self, spec: OrderSpec, extent_first: I64, epoch: int) -> None:
        first = np.ascontiguousarray(extent_first, np.int64)
        self.spec = spec
        self.epoch = epoch
        self.samples = int(first[-1])
        self.full_steps, self.tail_samples = divmod(self.samples, spec.global_batch)
        if self.samples > MAX_SIZE:
            raise InvalidInput(f"{self.samples} samples in one dataset: 2^48 is the most")
        if spec.last == "error" and self.tail_samples:
            raise InvalidInput(
                f"{self.samples} samples leave {self.tail_samples} over in global batches of"
                f" {spec.global_batch}: choose last='drop' or 'pad', or another batch size"
            )
        self._run_extent = _run_of_extents(spec, first, epoch)
        counts = first[self._run_extent + 1] - first[self._run_extent]
        self._run_first = np.concatenate(([0], np.cumsum(counts))).astype(np.int64)
        self._shift = first[self._run_extent] - self._run_first[:-1]
        self._block_first, self._block_key = self._blocks()

    @property
    def steps(self) -> int:
        """Global batches in the epoch, a partial one at the end included unless it is dropped."""
        return self.full_steps + self.has_tail

    @property
    def has_tail(self) -> bool:
        """Whether step `full_steps` exists and is answered by `tail`."""
        return self.tail_samples > 0 and self.spec.last != "drop"

    def slots(self, first_step: int, last_step: int, low: int, high: int) -> I64:
        """Samples in the slots [low, high) of the full batches [first_step, last_step).

        int64[last_step - first_step, high - low]. Any step costs the same; ask for 65,536 samples or more.
        """
        assert 0 <= first_step <= last_step <= self.full_steps
        assert 0 <= low <= high <= self.spec.global_batch
        samples = np.empty((last_step - first_step, high - low), np.int64)
        steps = np.arange(first_step, last_step, dtype=np.int64)[:, None]
        column = 0
        for part in self._parts(low, high):
            positions = part.base + steps * part.width + np.arange(part.low, part.high, dtype=np.int64)
            width = part.high - part.low
            samples[:, column : column + width] = self._samples(positions.reshape(-1)).reshape(-1, width)
            column += width
        return samples

    def tail(self, low: int, high: int) -> Tail:
        """The slots [low, high) of the last, partial batch. The real samples are dealt evenly over the slots.

        `pad` repeats samples from the end of the last full batches, so every slot is filled, whatever the
        number of ranks. Raises `InvalidInput` for a part of a `short` batch.
        """
        real, repeats = self._tail_positions(low, high)
        return Tail(np.concatenate((self._samples(real), self._scattered(repeats))), real.size)

    def plan(self, low: int, high: int) -> Plan:
        """The extents that a rank with the slots [low, high) touches, and when. O(extents).

        Unshuffled it is exact. Shuffled, an extent counts as touched for as long as its block is, since any
        position of a block may name any of its samples. A sample belongs to the extent of its first byte: a
        reader adds the extents into which its samples run on.
        """
        found = [self._touched(part) for part in self._parts(low, high)]
        if self.has_tail:
            positions = np.concatenate(self._tail_positions(low, high))
            blocks = np.unique(self._block_of(positions))
            step = np.full(blocks.size, self.full_steps, np.int64)
            found.append((blocks, step, step))
        if not found:
            return Plan(*(np.empty(0, np.int64) for _ in range(3)))
        blocks, first_step, last_step = (np.concatenate(column) for column in zip(*found, strict=True))
        order = np.argsort(first_step, kind="stable")
        return self._extents_of(blocks[order], first_step[order], last_step[order])

    def _blocks(self) -> tuple[I64, U64]:
        """Where each block begins in the run, the run's end appended, and each block's key."""
        if not self.spec.shuffle:
            return self._run_first, np.empty(0, np.uint64)
        firsts, keys = [], []
        for region, (start, stop) in enumerate(self._regions()):
            if start == stop:
                continue
            # extents first..last lie in the region, at least in part; a block is a window of them
            first = int(np.searchsorted(self._run_first, start, side="right")) - 1
            last = int(np.searchsorted(self._run_first, stop, side="left"))
            bounds = self._run_first[first : last : self.spec.window_extents or last].copy()
            bounds[0] = start
            firsts.append(bounds)
            prefix = mix(_Use.BLOCK, self.spec.seed, self.epoch, region)
            keys.append(mix_each(prefix, np.arange(bounds.size)))
        firsts.append(np.array([self.samples], np.int64))
        return np.concatenate(firsts), np.concatenate([np.empty(0, np.uint64), *keys])

    def _regions(self) -> Iterator[tuple[int, int]]:
        """The part of the run of each canonical node, then the tail's."""
        full, batch, nodes = self.full_steps, self.spec.global_batch, self.spec.canonical_nodes
        for node in range(nodes):
            yield full * (node * batch // nodes), full * ((node + 1) * batch // nodes)
        yield full * batch, self.samples

    def _parts(self, low: int, high: int) -> Iterator[_Part]:
        """The slots [low, high), cut at the canonical nodes that hold them."""
        nodes = self.spec.canonical_nodes if self.spec.shuffle else 1
        batch = self.spec.global_batch
        # floor(cG/C) <= slot first holds for c = ceil((slot + 1) * C / G) - 1
        for node in range(((low + 1) * nodes - 1) // batch, nodes):
            start, stop = node * batch // nodes, (node + 1) * batch // nodes
            if start >= high or low == high:
                return
            yield _Part(
                start * self.full_steps, stop - start, max(low, start) - start, min(high, stop) - start
            )

    def _tail_positions(self, low: int, high: int) -> tuple[I64, I64]:
        """Positions of the real samples and of the repeats in the slots [low, high) of the partial batch."""
        batch, left = self.spec.global_batch, self.tail_samples
        assert self.has_tail
        assert 0 <= low <= high <= batch
        if self.spec.last == "short" and (low, high) != (0, batch):
            raise InvalidInput(
                f"a short last batch of {left} samples cannot be shared by several ranks:"
                " choose last='pad' or 'drop'"
            )
        first, end = low * left // batch, high * left // batch
        real = self.full_steps * batch + np.arange(first, end, dtype=np.int64)
        if self.spec.last == "short":
            return real, real[:0]
        # repeats go backwards from the tail's beginning: these extents were touched last, so a cache has them
        repeats = self.full_steps * batch - 1 - np.arange(low - first, high - end, dtype=np.int64)
        return real, repeats % self.samples

    def _samples(self, positions: I64) -> I64:
        """Samples at ascending positions of the run."""
        if positions.size == 0:
            return positions
        if not self.spec.shuffle:
            return positions
        first, last = self._block_of(positions[[0, -1]])
        cuts = np.searchsorted(positions, self._block_first[first + 1 : last + 1])
        edges = np.concatenate(([0], cuts, [positions.size]))
        if positions.size < _GROUPED_BELOW * (edges.size - 1):
            return self._many_blocks(positions, np.repeat(np.arange(first, last + 1), np.diff(edges)))
        samples = np.empty_like(positions)
        for block, start, stop in zip(range(first, last + 1), edges[:-1], edges[1:], strict=True):
            samples[start:stop] = self._one_block(positions[start:stop], block)
        return samples

    def _one_block(self, positions: I64, block: int) -> I64:
        start, stop = int(self._block_first[block]), int(self._block_first[block + 1])
        images = permute(positions - start, stop - start, int(self._block_key[block])).astype(np.int64)
        images += start
        # the block's own extents only: a search among few is fast
        first, last = np.searchsorted(self._run_first, (start, stop - 1), side="right") - 1
        inside = np.searchsorted(self._run_first[first + 1 : last + 1], images, side="right")
        images += self._shift[first : last + 1][inside]
        return images

    def _many_blocks(self, positions: I64, blocks: I64) -> I64:
        base = int(blocks[0])
        firsts = self._block_first[base : int(blocks[-1]) + 2]
        group = blocks - base
        keys = self._block_key[base : base + firsts.size - 1]
        images = permute_groups(positions - firsts[group], group, np.diff(firsts), keys).astype(np.int64)
        images += firsts[group]
        images += self._shift[np.searchsorted(self._run_first, images, side="right") - 1]
        return images

    def _scattered(self, positions: I64) -> I64:
        """Samples at positions in any order."""
        ascending, back = np.unique(positions, return_inverse=True)
        return self._samples(ascending)[back]

    def _block_of(self, positions: I64) -> I64:
        return np.searchsorted(self._block_first, positions, side="right") - 1

    def _touched(self, part: _Part) -> tuple[I64, I64, I64]:
        """The blocks that the part's slots touch, with the first and the last step of each."""
        stop = part.base + self.full_steps * part.width
        if stop == part.base:
            return (np.empty(0, np.int64),) * 3
        first, last = self._block_of(np.array([part.base, stop - 1]))
        blocks = np.arange(first, last + 1)
        begin = np.maximum(self._block_first[blocks], part.base) - part.base
        end = np.minimum(self._block_first[blocks + 1], stop) - part.base
        first_step = np.maximum(begin - part.high, -part.width) // part.width + 1
        last_step = np.minimum((end - 1 - part.low) // part.width, self.full_steps - 1)
        held = first_step <= last_step
        return blocks[held], first_step[held], last_step[held]

    def _extents_of(self, blocks: I64, first_step: I64, last_step: I64) -> Plan:
        """One row for each extent of each block."""
        first = np.searchsorted(self._run_first, self._block_first[blocks], side="right") - 1
        counts = np.searchsorted(self._run_first, self._block_first[blocks + 1], side="left") - first
        rows = (
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        )
        return Plan(self._run_extent[rows], np.repeat(first_step, counts), np.repeat(last_step, counts))


def _run_of_extents(spec: OrderSpec, extent_first: I64, epoch: int) -> I64:
    """The extents that hold samples, in the order of the run."""
    held = np.flatnonzero(np.diff(extent_first))
    if not spec.shuffle or held.size == 0:
        return held
    return held[
        permute(np.arange(held.size), held.size, mix(_Use.EXTENTS, spec.seed, epoch)).astype(np.int64)
    ]
