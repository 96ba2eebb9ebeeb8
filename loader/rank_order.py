"""The indices of one rank's batches, for the samplers of its loader."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch.utils.data import default_convert

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput
from loader.batches.feed import Feed
from loader.datasets.dataset import key_transforms
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.wrapped import CacheDataset
from loader.job.checkpoint import MAX_COUNT, LoaderProgress
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
