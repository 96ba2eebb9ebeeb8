"""The indices of one rank's batches, and the `sampler` and `batch_sampler` of our DataLoader that have them.

Other programs build their own loaders from these (Accelerate's `skip_first_batches`, and through it the Trainer of
Hugging Face), or check their types: a DistributedSampler is sharded already, a SequentialSampler does not shuffle.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler, default_convert
from torch.utils.data.distributed import DistributedSampler

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.state import MAX_COUNT
from loader.batches.feed import Feed
from loader.datasets.dataset import key_transforms
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.wrapped import CacheDataset
from loader.job.checkpoint import LoaderProgress
from loader.order_setup import OrderArguments, feed_of

_log = logging.getLogger("cachesvc")


class RankOrder:
    """The order of one rank's indices, independent of any iteration. It outlives its loader: programs drop a loader once
    they have built another one from its samplers."""

    def __init__(
        self, loader: torch.utils.data.DataLoader[Any], core: CacheDataset, progress: LoaderProgress
    ) -> None:
        self._loader: weakref.ref[Any] | None = weakref.ref(loader)
        self._arguments = OrderArguments.of(loader)
        self._core, self._progress = core, progress

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_loader": None}

    @property
    def arguments(self) -> OrderArguments:
        """The loader's arguments as they are now; as they were last, once the loader is gone."""
        loader = self._live_loader()
        if loader is not None:
            self._arguments = OrderArguments.of(loader)
        return self._arguments

    @property
    def epoch(self) -> int:
        """The loader's epoch."""
        return self._progress.epoch(self._feed)

    def set_epoch(self, epoch: int) -> None:
        """See `DataLoader.set_epoch`."""
        loader = self._live_loader()
        if loader is not None:
            loader.set_epoch(epoch)
        else:
            self._progress.begin(whole_number("epoch", epoch, 0, MAX_COUNT), self._feed)

    def count_epoch(self, count: int) -> None:
        """See `RankSampler.set_epoch`."""
        epoch = self._progress.epoch_of_count(whole_number("epoch", count, 0, MAX_COUNT), self._feed)
        if epoch != count:
            _log.info("sampler.set_epoch(%d): epoch %d, since this loader was moved there", count, epoch)
        self.set_epoch(epoch)
        self._progress.note_count(count, epoch - count)

    def batches(self, repeats: bool) -> Iterator[list[int]]:
        """This rank's batches of the current epoch, from its first, and of as many epochs as one `iter()` of the loader has
        (one where that never ends). Without `repeats`: of one epoch, in which each sample comes once over all ranks, whose
        numbers of batches may differ. Raises InvalidInput for a mixture or packs."""
        if isinstance(self._core, (Mixture, Packed)):
            raise InvalidInput(
                f"a {type(self._core).__name__} is drawn anew in each epoch: no index names its samples to another loader"
                " (of accelerate.skip_first_batches, say); iterate this one, after load_state_dict() or skip(n)"
            )
        feed, epochs = self._upcoming(repeats)
        key_transforms(self._core.leaves, self._arguments.seed, epochs[0])
        return chain.from_iterable(self._epoch(feed, epoch, repeats) for epoch in epochs)

    def turns(self, repeats: bool) -> int:
        """The number of these batches."""
        feed, epochs = self._upcoming(repeats)
        turns = feed.turns_of(epochs[0], len(epochs))
        if repeats:
            return turns
        rest = range(feed.order(epochs[0]).full_steps * feed.share.accumulate, turns)
        return turns - sum(not feed.valid(epochs[0], turn) for turn in rest)

    def rows(self) -> int:
        """The number of their indices, repeated ones included."""
        feed, epochs = self._upcoming(True)
        return feed.rows_of(epochs[0], len(epochs))

    def _upcoming(self, repeats: bool) -> tuple[Feed, range]:
        """The order, and the epochs of one `iter()`."""
        feed, place, epochs = self._feed(), self._progress.place, self.arguments.epochs or 1
        first, _, done = place.next_of(feed, epochs) if place.resume else (place.epoch, 0, 0)
        if repeats:
            return feed, range(first, first + epochs - done)
        whole = replace(feed.spec, last="short")
        return Feed(feed.dataset, whole, feed.share, feed.collate), range(first, first + 1)

    def _epoch(self, feed: Feed, epoch: int, repeats: bool) -> Iterator[list[int]]:
        key_transforms(self._core.leaves, self._arguments.seed, epoch)
        for turn in range(feed.turns(epoch)):
            indices, valid = feed.indices(epoch, turn)
            if repeats or valid:
                yield (indices if repeats else indices[:valid]).tolist()
        self._progress.read_by_sampler = epoch

    def _feed(self) -> Feed:
        """The order of the dataset as it is now; it makes no batches. Raises InvalidInput, StateMismatch."""
        given, progress = replace(self.arguments, collate_fn=default_convert), self._progress
        return feed_of(given, self._core, given.topology(), progress.loaded, progress.place.epoch)

    def _live_loader(self) -> Any:
        return None if self._loader is None else self._loader()


class RankSampler(DistributedSampler[Any]):
    """This rank's indices: those of its batches, concatenated. Iterating does not move the loader."""

    data_source: Any

    def __init__(self, order: RankOrder) -> None:
        given = order.arguments
        self.order, self.dataset, self.data_source = order, given.dataset, given.dataset
        self.shuffle, self.seed, self.drop_last = given.shuffle, given.seed, given.drop_last

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self.order.batches(repeats=True))

    def __len__(self) -> int:
        return self.order.rows()

    def set_epoch(self, epoch: int) -> None:
        """Have the loader begin this epoch at its next `iter()`. Callers may count the epochs of this process alone, as
        Lightning's Fabric does: an epoch before the one that the loader was moved to (by a loaded state, a skip or its own
        `set_epoch`) means that one, and later epochs are counted from there."""
        self.order.count_epoch(epoch)

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The loader's epoch."""
        return self.order.epoch

    @property
    def rank(self) -> int:  # type: ignore[override]
        """This rank, among the ranks that read different samples."""
        return self.order.arguments.topology().rank

    @property
    def num_replicas(self) -> int:  # type: ignore[override]
        """The number of ranks that read different samples."""
        return self.order.arguments.topology().world_size

    @property
    def num_samples(self) -> int:  # type: ignore[override]
        """This rank's samples."""
        return len(self)

    @property
    def total_size(self) -> int:  # type: ignore[override]
        """All ranks' samples."""
        return self.num_samples * self.num_replicas


class RankSequentialSampler(RankSampler, SequentialSampler):
    """The sampler of a loader that does not shuffle."""


class RankRandomSampler(RankSampler, RandomSampler):
    """The sampler of a loader that shuffles."""

    replacement, generator = False, None


class RankBatchSampler(BatchSampler):
    """This rank's batches of indices. Constructed with another sampler, as Lightning does, it is torch's BatchSampler;
    constructed with this rank's own sampler (to predict), it yields each sample once, without repeats that make ranks
    equal."""

    repeats = False

    def __iter__(self) -> Iterator[list[int]]:
        if isinstance(self.sampler, RankSampler):
            return self.sampler.order.batches(self.repeats)
        return super().__iter__()

    def __len__(self) -> int:
        if isinstance(self.sampler, RankSampler):
            return self.sampler.order.turns(self.repeats)
        return super().__len__()

    def set_epoch(self, epoch: int) -> None:
        """See `DataLoader.set_epoch`; Hugging Face's Trainer calls it here."""
        if isinstance(self.sampler, RankSampler):
            self.sampler.order.set_epoch(epoch)
        elif hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)


def samplers_of(order: RankOrder) -> dict[str, Any]:
    """A loader's `sampler`, and its `batch_sampler` where it makes batches."""
    given = order.arguments
    sampler = (RankRandomSampler if given.shuffle else RankSequentialSampler)(order)
    if given.batch_size is None:
        return {"sampler": sampler}
    batches = RankBatchSampler(sampler, given.batch_size, given.drop_last)
    vars(batches)["repeats"] = True  # not as an argument, which Lightning would keep
    return {"sampler": sampler, "batch_sampler": batches}
