"""The orders of a dataset's epochs: which samples each step of a run has, without those that the run leaves out."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from cachesvc.core.errors import CorruptData
from cachesvc.core.order.assignment import Assignment
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from cachesvc.core.order.excluded import parse_excluded, repaired
from cachesvc.core.order.permute import Mask
from cachesvc.core.order.run import RunOrder
from cachesvc.core.order.skipped import NONE_SKIPPED, RunSteps, Skipped, parse_skipped
from cachesvc.core.order.substitutes import substitutes
from loader.datasets.extent_layout import ExtentLayout
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.job.topology import RankShare
from loader.reading.reader import Ints

CHUNK = 1 << 18
"""Positions of the order that are computed at once for a sum over them."""


class EpochOrders:
    """The orders of a dataset by epoch. `composite`: the mixture or packs that draw samples anew in each epoch; None for a
    dataset of the given layout."""

    def __init__(self, spec: OrderSpec, layout: ExtentLayout, composite: Mixture | Packed | None) -> None:
        self.spec, self._layout, self._composite = spec, layout, composite
        self._skipped, self._excluded = parse_skipped(spec.skipped), parse_excluded(spec.excluded)

    def of(self, epoch: int) -> EpochOrder | RunOrder:
        """Return the order of an epoch."""
        skipped = self._skipped_in(epoch)
        if self._composite is not None:
            run = self._composite.run(self.spec, epoch)
            in_time_order = isinstance(self._composite, Mixture) and self._composite.in_time_order
            return RunOrder(self.spec, run, epoch, skipped, in_time_order)
        return EpochOrder(self.spec, self._layout.extent_first, epoch, skipped)

    def indices_of(self, ordinals: Ints) -> Ints:
        """Return the dataset's indices of samples of an order."""
        index_of = self._layout.index_of
        return ordinals if index_of is None else index_of[ordinals]

    # ---- steps

    @property
    def run_steps(self) -> RunSteps:
        """The numbers of all steps of the run. Made for each use: one that is kept would refer back to this object, and a
        dataset that is dropped would hold its daemon's room until the garbage collector runs."""
        return RunSteps(self.spec.since_epoch, self.spec.since_step, self.mixture_changes, self.data_steps)

    @property
    def mixture_changes(self) -> tuple[int, ...]:
        """The epochs, ascending, from which a mixture has other weights, so that epochs may have another length."""
        return self._composite.weight_changes if isinstance(self._composite, Mixture) else ()

    @property
    def length_changes(self) -> tuple[int, ...]:
        """The epochs, ascending, from which epochs may have another length: those of other weights, and those that skip
        steps, or follow one that does."""
        if not self._skipped:
            return self.mixture_changes
        ends = (step for begin, end in self._skipped.ranges for step in (begin, end - 1))
        skipping = {place[0] for place in map(self.run_steps.place, ends) if place is not None}
        return tuple(sorted({*self.mixture_changes, *skipping, *(epoch + 1 for epoch in skipping)}))

    def data_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch, skipped ones included."""
        spec, composite = self.spec, self._composite
        size = int(self._layout.extent_first[-1]) if composite is None else composite.run(spec, epoch).size
        return Assignment(size, spec.global_batch, spec.node_parts, spec.last).data_steps

    def data_step(self, epoch: int, step: int) -> int:
        """Return the number, among all steps of an epoch, of a step that is kept."""
        return self._skipped_in(epoch).step(step)

    def kept_step(self, epoch: int, data_step: int) -> int:
        """The inverse of `data_step`; of a skipped step, the next one that is kept."""
        return self._skipped_in(epoch).number(data_step)

    def global_batch(self, epoch: int, data_step: int) -> tuple[Ints, Ints]:
        """Return the slots and the indices of the real samples of all ranks in a step of an epoch; none of a skipped step.
        `data_step` counts from the epoch's first."""
        order = self.of(epoch)
        if data_step in order.skipped:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        step = order.skipped.number(data_step)
        if step < order.full_steps:
            found = self.indices_of(order.slots(step, step + 1, 0, self.spec.global_batch))[0]
        else:
            tail = order.tail(0, self.spec.global_batch)
            found = self.indices_of(tail.samples)[0][: int(tail.valid[0])]
        spec = self.spec.at_step(self.run_steps.first(epoch) + data_step)
        kept = np.flatnonzero(~self._left_out(found, spec, epoch))
        return kept, found[kept]

    def taken(self, share: RankShare, epoch: int, first: int, last: int) -> Iterator[tuple[OrderSpec, Ints]]:
        """Yield the indices of the real samples in the batches [first, last) of a rank in an epoch, many at a time, and
        the spec as it is in their steps."""
        order, each, width = self.of(epoch), share.accumulate, share.high - share.low
        begin_step, end = first // each, min(order.full_steps, -(-last // each))
        bounds = {*range(begin_step, end, max(1, CHUNK // width)), end}
        changes = (order.skipped.number(step) for step in self._changes_in(epoch))
        bounds |= {step for step in changes if begin_step < step < end}
        for step, until in pairwise(sorted(bounds) if begin_step < end else ()):
            rows = order.slots(step, until, share.low, share.high)
            batches = self.indices_of(rows.reshape(-1, share.batch_size))
            begin, stop = max(0, first - step * each), last - step * each
            real = self._real(*self.without_excluded(order, share, step, batches, None), begin, stop)
            yield self.spec_at(epoch, step), real
        if order.has_tail and last > order.full_steps * each:
            samples, valid = order.tail(share.low, share.high, each)
            batches, step = self.indices_of(samples), order.full_steps
            begin, stop = max(0, first - step * each), last - step * each
            real = self._real(*self.without_excluded(order, share, step, batches, valid), begin, stop)
            yield self.spec_at(epoch, step), real

    @staticmethod
    def _real(rows: Ints, valid: Ints | None, begin: int, stop: int) -> Ints:
        """Return the real samples of the rows [begin, stop)."""
        rows = rows[begin:stop]
        return rows.reshape(-1) if valid is None else rows[np.arange(rows.shape[1]) < valid[begin:stop, None]]

    def index_at(self, order: EpochOrder | RunOrder, position: int) -> int:
        """Return the dataset's index at a position among an epoch's full batches, or in its partial batch if it has no full
        one."""
        step, slot = divmod(position, self.spec.global_batch)
        if order.full_steps:
            return int(self.indices_of(order.slots(step, step + 1, slot, slot + 1))[0, 0])
        return int(self.indices_of(order.tail(0, self.spec.global_batch).samples)[0, slot])

    def _skipped_in(self, epoch: int) -> Skipped:
        """Return the skipped steps of an epoch, counted from its first."""
        if not self._skipped:
            return NONE_SKIPPED
        return self._skipped.within(self.run_steps.first(epoch), self.data_steps(epoch))

    # ---- excluded samples

    def spec_at(self, epoch: int, step: int) -> OrderSpec:
        """Return the spec as it is in a kept step of an epoch: only samples that are left out there are excluded."""
        if not self._excluded:
            return self.spec
        return self.spec.at_step(self.run_steps.first(epoch) + self.data_step(epoch, step))

    def is_excluded(self, index: int, epoch: int) -> bool:
        """Return whether the run leaves out a sample from some step on."""
        return bool(self._left_out(np.array([index]), self.spec, epoch)[0])

    def without_excluded(
        self, order: EpochOrder | RunOrder, share: RankShare, first: int, rows: Ints, valid: Ints | None
    ) -> tuple[Ints, Ints | None]:
        """Put repeats in the place of excluded samples, behind the real ones.

        `rows` are the batches of a rank from step `first` of the order on; `valid` counts the real samples of each, None
        where all are real. Returns both anew.
        """
        if not self._excluded:
            return rows, valid
        steps = first + np.arange(len(rows)) // share.accumulate
        changes = [order.skipped.number(step) for step in self._changes_in(order.epoch)]
        edges = np.searchsorted(steps, [steps[0], *changes, steps[-1] + 1])
        bad = np.zeros(rows.shape, np.bool_)
        for begin, end in pairwise(edges.tolist()):
            if begin < end:
                spec = self.spec_at(order.epoch, int(steps[begin]))
                bad[begin:end] = self._left_out(rows[begin:end], spec, order.epoch)
        if not bad.any():
            return rows, valid
        rows, valid = repaired(rows, np.full(len(rows), rows.shape[1]) if valid is None else valid, bad)
        for row in np.flatnonzero(bad.all(axis=1)).tolist():
            rows[row] = self._replacement(order, int(steps[row]) * self.spec.global_batch + share.low)
        return rows, valid

    def _replacement(self, order: EpochOrder | RunOrder, position: int) -> int:
        """Return the index of a sample that repeats in a batch of excluded samples alone."""
        spec, positions = self.spec, order.full_steps * self.spec.global_batch or order.tail_samples
        for candidate in substitutes(spec.seed, order.epoch, position, spec.global_batch, positions):
            index = self.index_at(order, candidate)
            if not self.is_excluded(index, order.epoch):
                return index
        raise CorruptData("nearly all samples are excluded, and none was found for a batch: exclude fewer")

    def _changes_in(self, epoch: int) -> list[int]:
        """Return the steps of an epoch, counted from its first, from which samples are left out, ascending."""
        first = self.run_steps.first(epoch)
        return [step - first for step in self._excluded.steps if step > first]

    def _left_out(self, indices: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """Tell the samples that a spec excludes; packs of which nothing is left."""
        if self._composite is None or not spec.excluded:
            return parse_excluded(spec.excluded).among(indices)
        found: Mask = self._composite.left_out(indices.reshape(-1), spec, epoch).reshape(indices.shape)
        return found
