"""The sample order: a pure function of (seed, epoch, position).

    positions            the order: 0 .. N-1, cut into global batches of G slots
       | assigned        canonical node c of C owns the slots [cG/C, (c+1)G/C) of every full batch
    run positions        one contiguous part of the run for each canonical node, then the tail of N mod G
       | permuted        within blocks of `window_extents` extents, each block by its own key
    run                  the extents, permuted whole, their samples end to end, rotated by a random offset
       | shifted         a run position lies in one extent
       | permuted        inside the extents that a border of a part cuts
    samples              ids in dataset order

Properties, for every spec:
- *exactly once*: the full batches and the tail together name each sample once (`short` and `pad` add repeats, which do not
  count as valid; `drop` leaves the tail out);
- *even*: every sample is equally likely to be dropped, to be a repeat, and to be in the part of a canonical node, whatever
  the sizes of extents (see `extent_run.py`);
- *equal shapes*: a batch has the same number of samples on every rank, also in the last step;
- *elastic*: a global batch depends on the spec and the epoch only. Rank r of R takes the slots
  [rG/R, (r+1)G/R), so any number of ranks, workers or restarts sees the same global batches;
- *local*: canonical node c touches only its own part of the run, a block of extents at a time;
- *independent*: epochs and seeds have unrelated orders;
- *cheap*: memory O(extents), construction O(extents log extents), seek to any step O(log extents). A full
  global shuffle is the same function with one canonical node and one block.

With `shuffle_scope="node"` each canonical node has the same extents in all epochs (`homes.py`), and the run is the runs of
the nodes, end to end. Then *even* holds within each node, and the last batch has its repeats in every node's part.

Unshuffled, the run is the dataset itself and global batch b is the samples [bG, (b+1)G).

A subset is an order over its own ordinals: give `subset_first(extent_first, ids)` as `extent_first` and
look the resulting ordinals up in `ids`. Extents without samples take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, get_args

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.assignment import I64, Assignment, Places
from cachesvc.core.order.blocks import Blocks, blocks_of
from cachesvc.core.order.excluded import excluded_at, parse_excluded
from cachesvc.core.order.extent_run import CutExtents, ExtentRun
from cachesvc.core.order.homes import homes
from cachesvc.core.order.permute import (
    MAX_SIZE,
    Network,
    Use,
    distinct,
    mix,
    permute,
    permute_groups,
    unpermute,
)
from cachesvc.core.order.skipped import NONE_SKIPPED, Skipped, parse_skipped

Last = Literal["drop", "pad", "error", "short"]
ShuffleScope = Literal["job", "node"]

NEVER_ROTATED = 1 << 63
"""`rotated_from` of orders that no epoch rotates."""
_GROUPED_BELOW = 2048
"""Blocks with fewer positions than this in one request are permuted together: a call costs about 100 us."""


@dataclass(frozen=True, slots=True)
class OrderSpec:
    """Everything that the order depends on except the epoch; a run records it and keeps it.

    `window_extents` 0 means all. `last` says what becomes of the last N mod G samples: `drop` them, `pad` the batch to G
    with repeats, raise an `error`, or give a `short` batch, with repeats to the next multiple of the micro-batches in a
    step, so that all of them are equally large and none is empty. Epochs before `rotated_from` have a run that is not
    rotated, as components of mixtures and packs do.

    `shuffle_scope`: "job" has each epoch give every canonical node another part of the data, "node" gives each one part for
    the whole run.

    `skipped` names data steps of the run that are left out, and `excluded` samples, as the texts of `Skipped` and
    `Excluded`. These numbers hold from `since_epoch` on, which begins with data step `since_step`: `global_batch`, `last`
    and the window may change between epochs.
    Raises `InvalidInput` for numbers that make no order.
    """

    seed: int
    global_batch: int
    window_extents: int = 0
    canonical_nodes: int = 1
    shuffle: bool = True
    last: Last = "drop"
    rotated_from: int = 0
    skipped: str = ""
    excluded: str = ""
    since_epoch: int = 0
    since_step: int = 0
    shuffle_scope: ShuffleScope = "job"

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
        if self.shuffle_scope not in get_args(ShuffleScope):
            raise InvalidInput(
                f"shuffle_scope={self.shuffle_scope!r}: give one of {', '.join(get_args(ShuffleScope))}"
            )
        parse_skipped(self.skipped)
        parse_excluded(self.excluded)

    def at_step(self, step: int) -> OrderSpec:
        """The same order, in which only those samples are `excluded` that are left out in a data step."""
        found = excluded_at(self.excluded, step)
        return self if found == self.excluded else replace(self, excluded=found)

    @property
    def node_parts(self) -> int:
        """The number of canonical nodes that have a part of the run; 1 for an unshuffled run."""
        return self.canonical_nodes if self.shuffle else 1

    @property
    def by_node(self) -> bool:
        """Whether each of several canonical nodes keeps its part of the data."""
        return self.shuffle_scope == "node" and self.node_parts > 1


class Tail(NamedTuple):
    """One rank's part of the last, partial batch: `samples`, int64[micro-batches, rows], of which the first `valid[i]` of
    row i are real and the others repeats."""

    samples: I64
    valid: I64


class Plan(NamedTuple):
    """The extents that one rank touches: `extent[i]` from step `first_step[i]` to `last_step[i]`, both included. int64[n].

    Sorted by first step. An extent occurs again where another part of the order touches it. `following`: the extents in
    the order of the next epoch, where the caller knows that there is one. `local`: the plans of all epochs have the
    extents of `extent` and `following`, and no others.
    """

    extent: I64
    first_step: I64
    last_step: I64
    following: I64 | None = None
    local: bool = False


def window_extents(extent_sizes: I64, window_bytes: int) -> int:
    """The `window_extents` of a window in bytes, at least one; 0 for 0, which means all."""
    if not window_bytes:
        return 0
    mean = max(1.0, float(extent_sizes.mean())) if extent_sizes.size else 1.0
    return max(1, round(window_bytes / mean))


def merged(plans: Sequence[Plan]) -> Plan:
    """Several plans of one dataset with the same steps, as one plan; without `following`, unless all are local."""
    if len(plans) == 1:
        return plans[0]
    columns = zip(*(plan[:3] for plan in plans), strict=True)
    extent, first_step, last_step = (np.concatenate(column) for column in columns)
    order = np.argsort(first_step, kind="stable")
    found = Plan(extent[order], first_step[order], last_step[order])
    if all(plan.local and plan.following is not None for plan in plans):
        return found._replace(following=np.concatenate([plan.following for plan in plans]), local=True)
    return found


class OrderTables(NamedTuple):
    """The arrays from which another processor computes the full batches of a rank.

    Slot i of full batch b has the run position p = `places.base[i] + b * places.width[i]`, in the block k with
    `block_first[k]` <= p < `block_first[k + 1]`. `network` (None in an unshuffled order) permutes p - `block_first[k]` by
    its permutation k. The sample at a position q of the permuted run is q + `shift[r]`, where r is the last with
    `run_first[r]` <= q, permuted inside its extent if `cut.row[r]` is not -1.
    """

    places: Places
    block_first: I64
    network: Network | None
    run_first: I64
    shift: I64
    cut: CutExtents


class Touches(NamedTuple):
    """Extent `extent[i]` holds samples of the run positions [begin[i], end[i])."""

    extent: I64
    begin: I64
    end: I64


def plan_of(assignment: Assignment, touches: Touches, low: int, high: int, batches: int) -> Plan:
    """The plan of a rank with the slots [low, high) in `batches` micro-batches, for the extents that `touches` names."""
    steps = assignment.touched(touches.begin, touches.end, low, high, batches)
    order = np.argsort(steps.first_step, kind="stable")
    return Plan(touches.extent[steps.row[order]], steps.first_step[order], steps.last_step[order])


def tail_of(
    assignment: Assignment,
    at: Callable[[I64], I64],
    low: int,
    high: int,
    batches: int,
    repeat: Callable[[I64], I64] | None = None,
) -> Tail:
    """The slots [low, high) of the partial batch. `at` gives the samples at ascending positions; `repeat`, where it is
    given, those of repeats, at positions in any sequence."""
    positions, valid = assignment.tail(low, high, batches)
    ascending, back = np.unique(positions.reshape(-1), return_inverse=True)
    samples = at(ascending)[back].reshape(positions.shape)
    if repeat is not None:
        is_repeat = np.arange(positions.shape[1]) >= valid[:, None]
        samples[is_repeat] = repeat(positions[is_repeat])
    return Tail(samples, valid)


def sample_key(seed: int, epoch: int, sample: int) -> int:
    """The 64-bit key of the random generator for a transform of this sample in this epoch."""
    return mix(Use.SAMPLE, seed, epoch, sample)


class EpochOrder:
    """The order of one epoch. Immutable; safe to share between threads and to send to workers.

    `extent_first[i]` is the first sample of extent i, int64[E+1], with the number of samples at the end.
    `steps` counts the global batches of the epoch, with a partial one at the end unless it is dropped. `full_steps` of them
    are full. Where `has_tail`, step `full_steps` is the partial one, which `tail` gives.
    `run` holds the extents in their order. A block begins at each position in `block_first`, to which the run's end is
    appended. `skipped`: steps of this epoch that are left out; see `Assignment`.
    Raises `InvalidInput` when `last` is `error` and samples are left over.
    """

    def __init__(
        self, spec: OrderSpec, extent_first: I64, epoch: int, skipped: Skipped = NONE_SKIPPED
    ) -> None:
        first = np.ascontiguousarray(extent_first, np.int64)
        self.spec = spec
        self.epoch = epoch
        self.extent_first, self.samples = first, int(first[-1])
        if self.samples > MAX_SIZE:
            raise InvalidInput(f"{self.samples} samples in one dataset: 2^48 is the most")
        self._assignment = assignment = Assignment(
            self.samples, spec.global_batch, spec.node_parts, spec.last, skipped, spec.by_node
        )
        self.skipped, self.data_steps = skipped, assignment.data_steps
        self.steps, self.full_steps = assignment.steps, assignment.full_steps
        self.has_tail, self.tail_samples = assignment.has_tail, assignment.tail_size
        cut = assignment.tail_size > 0 or spec.node_parts > 1
        self._rotated = spec.shuffle and cut and (spec.by_node or epoch >= spec.rotated_from)
        borders = distinct(np.array([*assignment.regions()], np.int64).reshape(-1)) if self._rotated else None
        self._homes = homes(first, spec.seed, assignment.bounds) if spec.by_node else None
        pieces, rings = (first, ()) if self._homes is None else (self._homes.first, self._homes.of_node)
        self.run = ExtentRun(pieces, spec.seed, epoch, spec.shuffle, borders, rings)
        self._blocks: Blocks | None = None
        self.block_first = self.run.first
        if spec.shuffle:
            regions = assignment.regions()
            self._blocks = blocks_of(self.run, regions, spec.window_extents, self._rotated, spec.seed, epoch)
            self.block_first = self._blocks.first

    def slots(self, first_step: int, last_step: int, low: int, high: int) -> I64:
        """Samples in the slots [low, high) of the full batches [first_step, last_step).

        int64[last_step - first_step, high - low]. Any step costs the same. Ask for at least 16,384 samples at once.
        """
        return self._assignment.slots(self.at, first_step, last_step, low, high)

    def tables(self, low: int, high: int) -> OrderTables:
        """Return the arrays from which `slots` of the slots [low, high) can be computed. O(extents + slots)."""
        sizes = np.diff(self.block_first).astype(np.uint64)
        blocks = self._blocks
        network = None if blocks is None else Network(sizes, blocks.keys(np.arange(sizes.size)))
        run = self.run
        return OrderTables(
            self._assignment.places(low, high), self.block_first, network, run.first, run.shift, run.cut
        )

    def tail(self, low: int, high: int, batches: int = 1) -> Tail:
        """The slots [low, high) of the last, partial batch, cut into `batches` micro-batches. All micro-batches of the
        global batch are equally large, and its repeats come last.

        Repeats are samples of the extents at the end of the last full batches. The real samples of the batch are the same
        for any number of ranks; the repeats are not.
        """
        # Where a block has extents of several sizes, its samples are not equally likely at one position.
        repeat = self.run.permuted_samples if self._rotated and not self.skipped else None
        return tail_of(self._assignment, self.at, low, high, batches, repeat)

    def plan(self, low: int, high: int, batches: int = 1) -> Plan:
        """The extents that a rank with the slots [low, high) in `batches` micro-batches touches, and when. O(extents).

        An unshuffled plan is exact. In a shuffled one, an extent counts as touched for as long as its block is, since any
        position of a block may name any of its samples. A sample belongs to the extent of its first byte; a reader adds the
        extents into which its samples continue.
        """
        return plan_of(self._assignment, self.touches(), low, high, batches)

    def own_extents(self, low: int, high: int) -> I64 | None:
        """The extents that the canonical nodes of the slots [low, high) read in all epochs, also those that this epoch
        drops; None where epochs have different ones."""
        if self._homes is None:
            return None
        pieces = [self._homes.of_node[node] for node in self._assignment.nodes_of(low, high)]
        return np.unique(self._homes.extent[np.concatenate(pieces)])

    def place(self, sample: int) -> tuple[int, int] | None:
        """The data step of this epoch that has a sample, and its slot there; its row, in the partial batch. None where the
        tail is dropped. O(log extents); the inverse of `slots` and `tail`."""
        position = sample
        if self._blocks is not None:
            position = self.run.position(sample)
            block = int(self._block_of(np.array([position]))[0])
            start, stop = int(self.block_first[block]), int(self.block_first[block + 1])
            position = start + unpermute(position - start, stop - start, self._blocks.key(block))
        return self._assignment.place(position)

    def touches(self) -> Touches:
        """The run positions of each extent: one row for each extent of each block, in the order of the run."""
        run, begin, end = self.run, self.block_first[:-1], self.block_first[1:]
        first = np.searchsorted(run.first, begin, side="right") - 1
        counts = np.searchsorted(run.first, end, side="left") - first
        if self._rotated:  # a block with both ends of a ring has one extent twice
            counts -= (counts > 1) & (run.extents[first] == run.extents[first + counts - 1])
        rows = (
            np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + np.repeat(first, counts)
        )
        extents = run.extents[rows]
        if self._homes is not None:
            extents = self._homes.extent[extents]
        return Touches(extents, np.repeat(begin, counts), np.repeat(end, counts))

    def at(self, positions: I64) -> I64:
        """The samples at ascending positions of the run, with any gaps. int64, of the shape of `positions`."""
        if positions.size == 0:
            return positions
        if self._blocks is None:
            return positions
        first, last = self._block_of(positions[[0, -1]])
        cuts = np.searchsorted(positions, self.block_first[first + 1 : last + 1])
        edges = np.concatenate(([0], cuts, [positions.size]))
        if positions.size < _GROUPED_BELOW * (edges.size - 1):
            blocks = np.repeat(np.arange(first, last + 1), np.diff(edges))
            return self._many_blocks(positions, blocks, self._blocks)
        samples = np.empty_like(positions)
        for block, start, stop in zip(range(first, last + 1), edges[:-1], edges[1:], strict=True):
            samples[start:stop] = self._one_block(positions[start:stop], block, self._blocks.key(block))
        return samples

    def _one_block(self, positions: I64, block: int, key: int) -> I64:
        start, stop = int(self.block_first[block]), int(self.block_first[block + 1])
        images = permute(positions - start, stop - start, key).view(np.int64)
        images += start
        return self.run.samples(images, start, stop)

    def _many_blocks(self, positions: I64, of_position: I64, blocks: Blocks) -> I64:
        base = int(of_position[0])
        firsts = self.block_first[base : int(of_position[-1]) + 2]
        group = of_position - base
        keys = blocks.keys(np.arange(base, base + firsts.size - 1))
        images = permute_groups(positions - firsts[group], group, np.diff(firsts), keys).view(np.int64)
        images += firsts[group]
        return self.run.samples(images, int(firsts[0]), int(firsts[-1]))

    def _block_of(self, positions: I64) -> I64:
        return np.searchsorted(self.block_first, positions, side="right") - 1
