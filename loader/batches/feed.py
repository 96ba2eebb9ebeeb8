"""Makes the batch of an (epoch, turn), in a worker or, without workers, in the trainer.

A turn is one batch of one rank: step * accumulate + micro-batch. A worker receives two numbers per batch and
computes the samples from them, since the order is a function.
"""

from __future__ import annotations

import copy
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate, get_worker_info

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec, Plan, merged
from cachesvc.core.order.run import RunOrder
from cachesvc.core.stalls import StallReport
from loader.batches.epoch_orders import EpochOrders
from loader.datasets.collate import default_collate_into
from loader.datasets.decoding.images import ImageMode
from loader.datasets.extent_layout import RecordSource, plans_for, read_plan, record_source
from loader.datasets.mixture import Mixture, packs_in
from loader.datasets.pack_form import NEW_RUNS, Edges
from loader.datasets.packing import Packed
from loader.datasets.plain_values import Empty
from loader.datasets.samples.kinds import Gather
from loader.datasets.shape_mismatch import describe_mismatch
from loader.datasets.wrapped import (
    WrappedDataset,
    as_view,
    cache_dataset_in,
    extent_layout,
    key_at,
    sample_fetcher,
)
from loader.job.topology import RankShare
from loader.process.latest import Latest
from loader.reading.opened_dataset import OpenedDataset
from loader.reading.reader import ExtentReader, Ints
from loader.reading.wait_clock import READING

SLAB = 16_384
"""Positions of the order computed at once: 60 to 70 ns each. Slabs of 65,536 are no faster and take 1.4 MiB more
per process; in slabs of 64 a position costs 5 us."""
NOT_READ = (0.0,) * len(READING)


class _LocatedBatches:
    """The batches of consecutive turns, whose samples are located at once: a batch only indexes arrays."""

    def __init__(self, method: Gather, reader: ExtentReader, ids: Ints) -> None:
        """`ids`: samples of the catalog, [turns, batch size]."""
        *columns, first, last = method.locate(reader, ids.reshape(-1))
        self._make = method.make
        self._one_extent = last is first
        """Each sample lies in a single extent."""
        arrays = [*columns, first] if self._one_extent else [*columns, first, last]
        self._arrays = [each.reshape(ids.shape) for each in arrays]

    def batch(self, reader: ExtentReader, row: int, empty: Empty | None) -> Any:
        """Make the batch of a row."""
        located = [each[row] for each in self._arrays]
        if self._one_extent:
            located.append(located[-1])
        return self._make(reader, located, empty)


class _Slab:
    """Consecutive turns, one per row, with the places of their samples."""

    __slots__ = ("first", "last", "located", "rows", "valid")

    def __init__(self, first: int, rows: Ints, valid: Ints | None) -> None:
        self.first, self.last = first, first + len(rows)
        self.rows, self.valid = rows, valid
        self.located: _LocatedBatches | None = None


class Feed(TorchDataset[Any]):
    """The batches of one rank by (epoch, turn). Picklable; each process keeps the order of its current epoch."""

    def __init__(
        self,
        dataset: TorchDataset[Any],
        spec: OrderSpec,
        share: RankShare,
        collate: Callable[[list[Any]], Any],
    ) -> None:
        self.dataset, self.spec, self.share, self.collate = dataset, spec, share, collate
        self.turn_stride = 1
        """Distance between consecutive turns made in this process: the number of workers."""
        self._prepare()

    def _prepare(self) -> None:
        self._view = as_view(self.dataset)
        core = cache_dataset_in(self.dataset)
        self._composite = core if isinstance(core, (Mixture, Packed)) else None
        self._wrapped = core.leaves if isinstance(core, WrappedDataset) else ()
        self._leaves = () if core is None else tuple(core.leaves)
        self._opened: list[OpenedDataset] = [leaf.opened for leaf in self._leaves]
        self._specs = [leaf.sample_spec for leaf in self._leaves]
        self._samples = self._view.sample_reader if self._view is not None else None
        self._gather = self._samples.gather(self.collate) if self._samples is not None else None
        self._samples_of = sample_fetcher(self.dataset)
        self.layout = extent_layout(self.dataset, self.spec.shuffle)
        self.orders = EpochOrders(self.spec, self.layout, self._composite)
        self.empty: Empty | None = None
        """Returns memory of a size in bytes to build a gathered batch in; None means new memory."""
        self.begin_sample: Callable[[int], None] | None = None
        """Is called with the index of each sample before it is made; None means that samples may be made together."""
        self.on_device: Callable[[EpochOrder, int], Any | None] | None = None
        """Returns the batch of a turn, made by a device, or None where the processor is to make it."""
        self._order: EpochOrder | RunOrder | None = None
        self._slab, self._slabs = self._no_slab(), Latest[_Slab]()
        self._followed: int | None = None
        """The epoch whose plan this worker has submitted."""

    def __getstate__(self) -> tuple[Any, ...]:
        return self.dataset, self.spec, self.share, self.collate, self.turn_stride

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dataset, self.spec, self.share, self.collate, self.turn_stride = state
        self._prepare()

    @property
    def records(self) -> RecordSource | None:
        """The places of this order's records, if batches are records that need no Python call per sample; else None."""
        view = self._view if self.collate is default_collate else None
        return record_source(view, self.layout) if view is not None else None

    @property
    def runs_python(self) -> bool:
        """Whether samples are made one by one in Python, perhaps by the user's code."""
        return self._gather is None

    @property
    def encoded_images(self) -> bool:
        """Whether a device should decode the images of batches."""
        return any(each.decode == "cuda" for each in self._specs)

    @property
    def image_mode(self) -> ImageMode:
        """The mode of decoded images."""
        return self._specs[0].image_mode

    def for_thread(self) -> Feed:
        """Return a feed for one thread; the feeds of a rank's threads compute its order once."""
        found = copy.copy(self)
        found._slabs, found.on_device = self._slabs, self.on_device
        return found

    def _no_slab(self) -> _Slab:
        return _Slab(0, np.empty((0, self.share.batch_size), np.int64), None)

    def order(self, epoch: int) -> EpochOrder | RunOrder:
        """Return the order of an epoch, and make it the current one."""
        order = self._order_of(epoch)
        if order is not self._order:
            self._order, self._slab = order, self._no_slab()
        return order

    def _order_of(self, epoch: int) -> EpochOrder | RunOrder:
        now = self._order  # stays in place
        return now if now is not None and now.epoch == epoch else self.orders.of(epoch)

    @property
    def length_changes(self) -> tuple[int, ...]:
        """The epochs, ascending, from which epochs may have another length."""
        return self.orders.length_changes

    def samples(self, epoch: int) -> int:
        """Return the number of samples of an epoch, dropped ones included."""
        return self._any_of_its_length(epoch).samples

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return self._any_of_its_length(epoch).steps

    def turns(self, epoch: int) -> int:
        """Return the number of batches of this rank in an epoch."""
        return self.steps(epoch) * self.share.accumulate

    @property
    def run_edges(self) -> Edges:
        """The edges of packs that were given none."""
        return next((packs.run_edges for packs in packs_in(self._composite)), NEW_RUNS)

    def turns_of(self, epoch: int, epochs: int) -> int:
        """Return the number of batches of this rank in `epochs` epochs from `epoch` on, at most `sys.maxsize`."""
        return self._sum_over(epoch, epochs, self.turns)

    def rows_of(self, epoch: int, epochs: int) -> int:
        """Return the number of samples in those batches, repeats included."""
        return self._sum_over(epoch, epochs, self._rows)

    def _sum_over(self, epoch: int, epochs: int, count: Callable[[int], int]) -> int:
        bounds = [
            epoch,
            *(each for each in self.length_changes if epoch < each < epoch + epochs),
            epoch + epochs,
        ]
        return min(sys.maxsize, sum(count(first) * (end - first) for first, end in pairwise(bounds)))

    def _rows(self, epoch: int) -> int:
        full, turns = self._any_of_its_length(epoch).full_steps * self.share.accumulate, self.turns(epoch)
        tail = (len(self.indices(epoch, turn)[0]) for turn in range(full, turns))
        return full * self.share.batch_size + sum(tail)

    def _any_of_its_length(self, epoch: int) -> EpochOrder | RunOrder:
        """Return an order that is as long as this epoch's."""
        equal = self._composite is None and not self.spec.skipped
        return self._order if equal and self._order is not None else self._order_of(epoch)

    def submit(self, epoch: int) -> frozenset[int]:
        """Tell each dataset's plan holder which extents this rank reads in which steps, as far as its indices map to
        extents: a daemon by the trainer, the direct reads of a worker by that worker. Returns the steps at which an extent
        is no longer needed."""
        order, share, worker = self.order(epoch), self.share, get_worker_info()
        part = (share.high - share.low) / self.spec.global_batch / (worker.num_workers if worker else 1)
        cut = share.low, share.high, share.accumulate
        if isinstance(order, RunOrder):
            following: Sequence[Ints | None] = self._extents_of(epoch + 1) or [None] * len(self._leaves)
            each_plan = zip(self._leaves, order.plans(*cut), following, strict=True)
            plans = [
                (leaf.opened, read_plan(leaf, plan._replace(following=then)))
                for leaf, plan, then in each_plan
            ]
        else:
            plans = plans_for(self.layout, order, *cut)
        shared: dict[int, list[Plan]] = {}  # one plan per connection: parts of one dataset share it
        for opened, plan in plans:
            shared.setdefault(id(opened), []).append(plan)
        for opened in self._opened:
            if id(opened) in shared:
                chosen = 1.0 if self._view is None else len(self._view) / max(1, opened.catalog.samples)
                opened.submit(merged(shared.pop(id(opened))), self, part * chosen)
        return frozenset(step for _, plan in plans for step in (plan.last_step + 1).tolist())

    def _extents_of(self, epoch: int) -> list[Ints] | None:
        """Return the extents of each leaf of a mixture or of packs in the order of an epoch; None where it has no order."""
        try:
            order = self.orders.of(epoch)
        except InvalidInput:  # that epoch itself says what is wrong with it
            return None
        assert isinstance(order, RunOrder), "of a mixture or of packs"
        share = self.share
        return [plan.extent for plan in order.plans(share.low, share.high, share.accumulate)]

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, turn = key
        if self.on_device is not None and not (
            self.spec.excluded and self.valid(*key) < self.share.batch_size
        ):
            order = self.order(epoch)
            assert isinstance(order, EpochOrder), "records of one dataset"
            if (batch := self.on_device(order, turn)) is not None:
                return batch
        slab = self._slab_with(epoch, turn)
        row = turn - slab.first
        if self._view is not None:
            reader = self._view.opened.reader()
            if reader.reads_ahead:
                self._read_ahead(reader, slab, row + self.turn_stride)
            if slab.located is not None:
                return slab.located.batch(reader, row, self.empty)
        return self.fetch(key, slab.rows[row])

    def _read_ahead(self, reader: ExtentReader, slab: _Slab, row: int) -> None:
        """Start the disk reads of a later batch while this one is copied. The last batches of a slab start none."""
        places = None if self._samples is None else self._samples.places
        if self._view is not None and places is not None and row < len(slab.rows):
            addresses, lengths = places(self._view.ids_of(slab.rows[row]))
            reader.expect(addresses.ravel(), lengths.ravel())

    def indices(self, epoch: int, turn: int) -> tuple[Ints, int]:
        """Return a batch's indices in the dataset, and how many of them are real: those behind them are padding."""
        slab = self._slab_with(epoch, turn)
        row = turn - slab.first
        return slab.rows[row], self.share.batch_size if slab.valid is None else int(slab.valid[row])

    def origin_bytes(self) -> dict[str, int]:
        """Return the bytes that this process has read, by origin."""
        total: Counter[str] = Counter()
        for opened in {id(one): one for one in self._opened}.values():
            total.update(opened.origin_bytes())
        return dict(total)

    def take_contents(self) -> list[tuple[int, int, bytes]]:
        """Return what this worker process was granted since the last call: the number of a dataset among this feed's, an
        extent, and the digest of its bytes."""
        each = ((number, leaf.summed.contents.take_unreported()) for number, leaf in enumerate(self._leaves))
        return [(number, *one) for number, found in each for one in found]

    def note_contents(self, contents: Iterable[tuple[int, int, bytes]]) -> None:
        """Enter digests that a worker reported."""
        for number, extent, content in contents:
            self._leaves[number].summed.contents.note(extent, content)

    def passed(self, turn: int) -> None:
        """Report that every batch before this turn is consumed."""
        self.passed_step(turn // self.share.accumulate)

    def passed_step(self, step: int) -> None:
        """Report that every batch before this step is consumed."""
        for opened in self._opened:
            opened.passed(step, self)

    def given_up(self) -> None:
        """Withdraw the plan: the iteration ended, perhaps in mid-epoch."""
        for opened in self._opened:
            opened.given_up(self)

    def report(self, report: StallReport) -> None:
        """Send the wait times of steps to the daemon's metrics."""
        if self._opened:
            self._opened[0].report(report)

    def valid(self, epoch: int, turn: int) -> int:
        """Return how many samples of a batch are no padding. Full batches cost one comparison."""
        if turn < self.order(epoch).full_steps * self.share.accumulate and not self.spec.excluded:
            return self.share.batch_size
        return self.indices(epoch, turn)[1]

    def key_of(self, index: int) -> str:
        """Return a sample's key in the source, "" if it has none or a user's own dataset hides it."""
        return key_at(self.dataset if self._view is None else self._view, index)

    def reading_s(self) -> tuple[float, ...]:
        """Return the seconds that this thread has waited for bytes, by `READING` of `wait_clock`."""
        each = {id(one): one.reading_s() for one in self._opened}.values()
        return tuple(map(sum, zip(*each, strict=True))) or NOT_READ

    def spec_at(self, epoch: int, turn: int) -> OrderSpec:
        """Return the spec as it is in a turn: only samples that are left out there are excluded."""
        return self.orders.spec_at(epoch, turn // self.share.accumulate)

    def fetch(self, key: tuple[int, int], indices: Ints) -> Any:
        """Make the batch of an (epoch, turn) of these indices."""
        name = partial(self._name_in, indices)
        if self._composite is not None and self.begin_sample is None and self.collate is default_collate:
            return self._composite.default_batch(indices, self.spec_at(*key), key[0], name)
        if self._gather is not None and self._view is not None:
            reader = self._view.opened.reader()
            return self._gather.make(
                reader, self._gather.locate(reader, self._view.ids_of(indices)), self.empty
            )
        samples = self._iter_samples(key, indices)
        if self.begin_sample is not None:
            return self.collated(list(samples))
        if self.collate is default_collate:
            return default_collate_into(self.empty, samples, len(indices), name)
        made = list(samples)
        try:
            return self.collate(made)
        except Exception as error:
            found = describe_mismatch(made, name)
            if found and hasattr(error, "add_note"):
                error.add_note(f"samples of the batch differ: {found}")
            raise

    def _name_in(self, indices: Ints, place: int) -> str:
        """Name the sample in one row of a batch, for errors."""
        index = int(indices[place])
        return self.key_of(index) or f"sample {index}"

    def collated(self, samples: list[Any]) -> Any:
        """Collate samples that `take` returned."""
        if self._composite is not None and self.collate is default_collate:
            return self._composite.collate(samples)
        return self.collate(samples)

    def take(self, key: tuple[int, int], indices: Ints) -> list[Any]:
        """Return the samples of these indices in an (epoch, turn), not collated."""
        return list(self._iter_samples(key, indices))

    def _iter_samples(self, key: tuple[int, int], indices: Ints) -> Iterable[Any]:
        """Make samples one at a time, so that the memory of one is free for the next."""
        if self.begin_sample is None:
            return self._samples_in_one_pass(key, indices)
        return self._samples_one_by_one(self.begin_sample, key, indices)

    def _samples_one_by_one(
        self, begin: Callable[[int], None], key: tuple[int, int], indices: Ints
    ) -> Iterable[Any]:
        for row, index in enumerate(indices.tolist()):
            begin(index)
            yield from self._samples_in_one_pass(key, indices[row : row + 1])

    def _samples_in_one_pass(self, key: tuple[int, int], indices: Ints) -> Iterable[Any]:
        if self._composite is not None:
            return self._composite.read(indices, self.spec_at(*key), key[0])
        rng_key = (self.spec.seed, key[0])
        for inner in self._wrapped:
            inner.rng_key = rng_key  # for threads in which the user's dataset reads
        return self._samples_of(indices, rng_key)

    def _slab_with(self, epoch: int, turn: int) -> _Slab:
        """Return the slab that has a turn, and make it the current one."""
        order, share = self.order(epoch), self.share
        if self._slab.first <= turn < self._slab.last:
            return self._slab
        if self._followed != epoch and get_worker_info() is not None:
            self._followed = epoch
            if not all(opened.link.daemon for opened in self._opened):
                self.submit(epoch)
        step = turn // share.accumulate
        if step >= order.full_steps:
            self._slab = self._slabs.get((epoch, None), lambda: self._tail(order))
        else:
            steps = max(1, SLAB // (share.high - share.low))
            first = step // steps * steps
            last = min(order.full_steps, first + steps)
            self._slab = self._slabs.get((epoch, first), lambda: self._full_slab(order, first, last))
        return self._slab

    def _full_slab(self, order: EpochOrder | RunOrder, first: int, last: int) -> _Slab:
        """Return the turns of full steps [first, last)."""
        share = self.share
        found = order.slots(first, last, share.low, share.high)
        rows = self.orders.indices_of(found.reshape(-1, share.batch_size))
        slab = _Slab(first * share.accumulate, *self.orders.without_excluded(order, share, first, rows, None))
        if self._gather is not None and self._view is not None:
            reader = self._view.opened.reader()
            slab.located = _LocatedBatches(self._gather, reader, self._view.ids_of(slab.rows))
        return slab

    def _tail(self, order: EpochOrder | RunOrder) -> _Slab:
        share = self.share
        samples, valid = order.tail(share.low, share.high, share.accumulate)
        rows, step = self.orders.indices_of(samples), order.full_steps
        return _Slab(step * share.accumulate, *self.orders.without_excluded(order, share, step, rows, valid))
