"""(epoch, turn) -> batch. What runs in a worker, and in the trainer itself without workers.

A turn is one batch of one rank: step * accumulate + micro-batch. Workers receive two numbers a batch and find
the samples themselves: the order is a function.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import default_collate

from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec, Plan, merged
from cachesvc.core.order.run import RunOrder
from cachesvc.core.stalls import StallReport
from loader.batches.fetch_samples import drawn_from
from loader.batches.gather import Located, whole
from loader.datasets.collate import default_collate_into
from loader.datasets.extent_layout import laid, plans_for
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.shape_mismatch import unlike
from loader.datasets.wrapped import Inside, flattened, key_at, ours
from loader.reading.address_range import Bytes
from loader.reading.opened_dataset import OpenedDataset
from loader.reading.reader import ExtentReader, Ints
from loader.reading.wait_clock import READING

SLAB = 16_384
"""Positions of the order computed at once: 60 to 70 ns each, as in slabs of 65,536, which take 1.4 MiB more in each
process; in slabs of 64 it is 5 us."""
NOT_READ = (0.0,) * len(READING)


class Turn(NamedTuple):
    """The key of a batch."""

    epoch: int
    turn: int


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of every global batch: the slots [low, high), in `accumulate` micro-batches."""

    low: int
    high: int
    batch_size: int

    @property
    def accumulate(self) -> int:
        """Batches that this rank sees in one step."""
        return (self.high - self.low) // self.batch_size


class _Slab:
    """Consecutive turns, located. Rows are turns."""

    __slots__ = ("first", "last", "located", "rows", "valid")

    def __init__(self, first: int, rows: Ints, valid: Ints | None) -> None:
        self.first, self.last = first, first + len(rows)
        self.rows, self.valid = rows, valid
        self.located: Located | None = None


class Feed(TorchDataset[Any]):
    """Batches of one rank by (epoch, turn). Picklable; each process keeps the order of the epoch it is in."""

    def __init__(
        self,
        dataset: TorchDataset[Any],
        spec: OrderSpec,
        share: Share,
        collate: Callable[[list[Any]], Any],
        ready: bool,
    ) -> None:
        """`ready`: a batch of records goes out as it was gathered, without `collate`."""
        self.dataset, self.spec, self.share, self.collate = dataset, spec, share, collate
        self._wants_ready = ready
        self.apart = 1
        """How many turns after one batch the next is made here: as many as there are workers."""
        self._prepare()

    def _prepare(self) -> None:
        self._view = flattened(self.dataset)
        core = ours(self.dataset)
        self._composed = core if isinstance(core, (Mixture, Packed)) else None
        self._inner = core.leaves if isinstance(core, Inside) else ()
        self._opened: list[OpenedDataset] = [] if core is None else [leaf.opened for leaf in core.leaves]
        self._samples = self._view.samples if self._view is not None else None
        self._whole = whole(self._samples, self.collate, self._wants_ready) if self._samples else None
        self._samples_of = drawn_from(self.dataset)
        self._laid = laid(self.dataset, self.spec.shuffle)
        self.empty: Callable[[int], Bytes] | None = None
        """Where gathered batches are built: bytes for a size; new memory when None."""
        self._order: EpochOrder | RunOrder | None = None
        self._slab = _Slab(0, np.empty((0, self.share.batch_size), np.int64), None)

    def __getstate__(self) -> tuple[Any, ...]:
        return self.dataset, self.spec, self.share, self.collate, self._wants_ready, self.apart

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dataset, self.spec, self.share, self.collate, self._wants_ready, self.apart = state
        self._prepare()

    def order(self, epoch: int) -> EpochOrder | RunOrder:
        """The order of an epoch, from which batches are made next."""
        if self._order is None or self._order.epoch != epoch:
            self._order = self._order_of(epoch)
            self._slab = _Slab(0, np.empty((0, self.share.batch_size), np.int64), None)
        return self._order

    def _order_of(self, epoch: int) -> EpochOrder | RunOrder:
        """The same, and batches go on to be made from another."""
        if self._order is not None and self._order.epoch == epoch:
            return self._order
        if self._composed is not None:
            return RunOrder(self.spec, self._composed.run(self.spec, epoch), epoch)
        return EpochOrder(self.spec, self._laid.extent_first, epoch)

    def samples(self, epoch: int) -> int:
        """Samples of an epoch, those that are dropped included."""
        return self._as_long_as(epoch).samples

    def steps(self, epoch: int) -> int:
        """Steps of an epoch."""
        return self._as_long_as(epoch).steps

    def turns(self, epoch: int) -> int:
        """Batches of this rank in an epoch."""
        return self.steps(epoch) * self.share.accumulate

    @property
    def changes(self) -> tuple[int, ...]:
        """The epochs from which on others may be longer or shorter, ascending."""
        return self._composed.changes if isinstance(self._composed, Mixture) else ()

    def turns_of(self, epoch: int, epochs: int) -> int:
        """Batches of this rank in so many epochs, which differ where a mixture gets other weights; no more than `len` can
        say."""
        return self._over(epoch, epochs, self.turns)

    def rows_of(self, epoch: int, epochs: int) -> int:
        """Samples in those batches, repeated ones included."""
        return self._over(epoch, epochs, self._rows)

    def _over(self, epoch: int, epochs: int, count: Callable[[int], int]) -> int:
        bounds = [epoch, *(each for each in self.changes if epoch < each < epoch + epochs), epoch + epochs]
        return min(sys.maxsize, sum(count(first) * (end - first) for first, end in pairwise(bounds)))

    def _rows(self, epoch: int) -> int:
        full, turns = self._as_long_as(epoch).full_steps * self.share.accumulate, self.turns(epoch)
        rest = (len(self.indices(epoch, turn)[0]) for turn in range(full, turns))
        return full * self.share.batch_size + sum(rest)

    def _as_long_as(self, epoch: int) -> EpochOrder | RunOrder:
        """An order of an epoch's length: any, but that a mixture may have other weights in each."""
        return self._order if self._composed is None and self._order is not None else self._order_of(epoch)

    def submit(self, epoch: int) -> frozenset[int]:
        """Say which extents this rank touches in which steps, to each dataset's holder; nothing where the indices
        say nothing of extents. Returns the steps at which an extent is done with."""
        order, share = self.order(epoch), self.share
        cut = share.low, share.high, share.accumulate
        if isinstance(order, RunOrder):
            plans = [*zip(self._opened, order.plans(*cut), strict=True)]
        else:
            plans = plans_for(self._laid, order, *cut)
        shared: dict[int, list[Plan]] = {}  # one plan a connection; parts of a dataset share theirs
        for opened, plan in plans:
            shared.setdefault(id(opened), []).append(plan)
        for opened in self._opened:
            if id(opened) in shared:
                opened.submit(merged(shared.pop(id(opened))), self)
        return frozenset(step for _, plan in plans for step in (plan.last_step + 1).tolist())

    def __getitem__(self, key: tuple[int, int]) -> Any:
        epoch, turn = key
        slab = self._slab
        if self._order is None or self._order.epoch != epoch or not slab.first <= turn < slab.last:
            slab = self._load(epoch, turn)
        row = turn - slab.first
        if self._view is not None:
            reader = self._view.opened.reader()
            if reader.on_disk:
                self._expect(reader, slab, row + self.apart)
            if slab.located is not None:
                return slab.located.batch(reader, row, self.empty)
        return self.fetch(epoch, slab.rows[row])

    def _expect(self, reader: ExtentReader, slab: _Slab, row: int) -> None:
        """Have the disk work on a later batch while this one is copied; at the end of a slab it rests once."""
        if self._view is not None and self._samples is not None and row < len(slab.rows):
            self._samples.expect(reader, self._view.ids_of(slab.rows[row]))

    def indices(self, epoch: int, turn: int) -> tuple[Ints, int]:
        """A batch's indices in the dataset, and how many of them are real (the first ones)."""
        self.order(epoch)
        slab = self._slab
        if not slab.first <= turn < slab.last:
            slab = self._load(epoch, turn)
        row = turn - slab.first
        return slab.rows[row], self.share.batch_size if slab.valid is None else int(slab.valid[row])

    def origin_bytes(self) -> dict[str, int]:
        """Bytes that this process read so far, by where they lay."""
        total: Counter[str] = Counter()
        for opened in {id(one): one for one in self._opened}.values():
            total.update(opened.origin_bytes())
        return dict(total)

    def passed(self, turn: int) -> None:
        """Everything before this turn has been consumed."""
        self.passed_step(turn // self.share.accumulate)

    def passed_step(self, step: int) -> None:
        """Everything before this step has been consumed."""
        for opened in self._opened:
            opened.passed(step, self)

    def given_up(self) -> None:
        """The iteration ended, in mid-epoch perhaps."""
        for opened in self._opened:
            opened.given_up(self)

    def report(self, report: StallReport) -> None:
        """Say what steps waited for, to a daemon's metrics."""
        if self._opened:
            self._opened[0].report(report)

    def valid(self, epoch: int, turn: int) -> int:
        """How many samples of a batch are real; full batches cost a comparison."""
        if turn < self.order(epoch).full_steps * self.share.accumulate:
            return self.share.batch_size
        return self.indices(epoch, turn)[1]

    def index_at(self, epoch: int, position: int) -> int:
        """The dataset's index at a position of the epoch's full batches; of its partial one where that is all."""
        order, (step, slot) = self.order(epoch), divmod(position, self.spec.global_batch)
        if order.full_steps:
            return int(self._arranged(order.slots(step, step + 1, slot, slot + 1))[0, 0])
        return int(self._arranged(order.tail(0, self.spec.global_batch).samples)[0, slot])

    def key_of(self, index: int) -> str:
        """A sample's key in the source; "" where it has none, or who wrote the dataset alone knows."""
        return key_at(self.dataset if self._view is None else self._view, index)

    def reading_s(self) -> tuple[float, ...]:
        """Seconds that this thread waited for bytes so far, by `wait_clock.READING`."""
        each = {id(one): one.reading_s() for one in self._opened}.values()
        return tuple(map(sum, zip(*each, strict=True))) or NOT_READ

    def fetch(self, epoch: int, indices: Ints) -> Any:
        """A batch of these indices."""
        name = partial(self._name_in, indices)
        if self._composed is not None and self._wants_ready:
            return self._composed.whole(indices, self.spec, epoch, name)
        if self._whole is not None and self._view is not None:
            reader = self._view.opened.reader()
            return self._whole.make(
                reader, self._whole.locate(reader, self._view.ids_of(indices)), self.empty
            )
        samples = self._drawn(epoch, indices)
        if self.collate is default_collate:
            return default_collate_into(self.empty, samples, len(indices), name)
        made = list(samples)
        try:
            return self.collate(made)
        except Exception as error:
            found = unlike(made, name)
            if found and hasattr(error, "add_note"):
                error.add_note(f"samples of the batch differ: {found}")
            raise

    def _name_in(self, indices: Ints, place: int) -> str:
        """The name of the sample at a place of a batch."""
        index = int(indices[place])
        return self.key_of(index) or f"sample {index}"

    def collated(self, samples: list[Any]) -> Any:
        """A batch of samples that were taken."""
        if self._composed is not None and self._wants_ready:
            return self._composed.collate(samples)
        return self.collate(samples)

    def take(self, epoch: int, indices: Ints) -> list[Any]:
        """The samples of these indices, before they are made a batch."""
        return list(self._drawn(epoch, indices))

    def _drawn(self, epoch: int, indices: Ints) -> Iterable[Any]:
        """One after the other, so that what made one is free for the next."""
        if self._composed is not None:
            return self._composed.read(indices, self.spec, epoch)
        draw = (self.spec.seed, epoch)
        for inner in self._inner:
            inner.draw = draw  # for threads that the outer dataset reads in
        return self._samples_of(indices, draw)

    def _load(self, epoch: int, turn: int) -> _Slab:
        order, share = self.order(epoch), self.share
        step = turn // share.accumulate
        if step >= order.full_steps:
            slab = self._tail(order)
        else:
            width = share.high - share.low
            last = min(order.full_steps, step + max(1, SLAB // width))
            found = order.slots(step, last, share.low, share.high)
            slab = _Slab(step * share.accumulate, self._arranged(found.reshape(-1, share.batch_size)), None)
            if self._whole is not None and self._view is not None:
                slab.located = Located(self._whole, self._view.opened.reader(), self._view.ids_of(slab.rows))
        self._slab = slab
        return slab

    def _tail(self, order: EpochOrder | RunOrder) -> _Slab:
        share = self.share
        samples, valid = order.tail(share.low, share.high, share.accumulate)
        return _Slab(order.full_steps * share.accumulate, self._arranged(samples), valid)

    def _arranged(self, ordinals: Ints) -> Ints:
        arrange = self._laid.arrange
        return ordinals if arrange is None else arrange[ordinals]
