"""A sampler of torch's own over a dataset of ours: what it draws for an epoch becomes the plan, so the daemon looks
ahead for it too. Samplers of other kinds may draw by what the training does meanwhile: they are asked when torch asks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.distributed import DistributedSampler

from cachesvc.core.arguments import places_of
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import Plan
from loader.datasets.dataset import Dataset, key_transforms
from loader.datasets.wrapped import flattened, hidden_in, leaves_in
from loader.job.topology import rank_hint
from loader.process.fork_hooks import forks_workers
from loader.samplers import RankBatchSampler
from loader.workers.engines import Given

_DRAW_AT_ONCE = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
MOST = 1_000_000
"""Samples of an epoch that are drawn ahead: 0.35 s, and 95 MB for that moment. What draws more is asked as torch
asks it."""


class Foretold:
    """The batches of `sampler`, all drawn when an epoch begins and then handed on, as it would have given them."""

    def __init__(self, sampler: BatchSampler, dataset: TorchDataset[Any], behind: int) -> None:
        """`behind`: batches that may be asked for before one has been consumed."""
        self._sampler, self._dataset, self._behind = sampler, dataset, behind

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        view = flattened(self._dataset)
        if view is None or len(self._sampler) * self._sampler.batch_size > MOST:
            yield from self._sampler
            return
        batches, plan = self._drawn(view)
        if plan is None:
            yield from batches
            return
        opened = view.opened
        opened.submit(plan, self)
        try:
            for step, batch in enumerate(batches):
                opened.passed(max(0, step - self._behind), self)
                yield batch
            opened.passed(len(self._sampler), self)
        finally:
            opened.given_up(self)

    def _drawn(self, view: Dataset) -> tuple[Iterable[list[int]], Plan | None]:
        """The batches, and their plan; none where there are no such samples, which whoever reads them is told."""
        generator: torch.Generator | None = getattr(self._sampler.sampler, "generator", None)
        batches: Iterable[list[int]]
        if generator is None:
            drawn = batches = list(self._sampler)
        else:  # a user's: drawn again, so that at a break it stands where torch would have left it
            before = generator.get_state()
            drawn, batches = list(self._sampler), self._sampler
            generator.set_state(before)
        try:
            return batches, plan_of(view, drawn) if drawn else None
        except (IndexError, TypeError):
            return batches, None


def foretold(sampler: Any, dataset: TorchDataset[Any], behind: int) -> Any:
    """The sampler, or what stands for it where its batches are known ahead."""
    known = type(sampler) in (BatchSampler, RankBatchSampler) and type(sampler.sampler) in _DRAW_AT_ONCE
    return Foretold(sampler, dataset, behind) if known else sampler


class Foreign(Protocol):
    """What matters of a loader that torch alone runs, besides how batches come to be made."""

    seed: int
    shard: bool
    dataset: TorchDataset[Any]
    batch_size: int | None
    sampler: Sampler[Any] | Iterable[Any]
    batch_sampler: Sampler[Any] | Iterable[Any] | None


def stateless(dataset: TorchDataset[Any]) -> str:
    """Why a loader over this dataset that torch alone runs has no state."""
    if not isinstance(dataset, IterableDataset) and any(True for _ in leaves_in(dataset)):
        cause, way_out = "it was given a sampler", "; leave the sampler out"
    else:
        cause, way_out = (
            f"{type(dataset).__name__} is no map-style dataset of open_dataset and holds none",
            "",
        )
    return f"this DataLoader runs as torch's own, for {cause}: its state is empty, and a resumed epoch begins anew{way_out}"


def begin_as_torch(
    loader: Foreign, given: Given, epoch: int, begin: Callable[[], Iterator[Any]]
) -> Iterator[Any]:
    """An iteration that torch's own loader begins; transforms draw from the loader's seed and this epoch. Raises
    InvalidInput for what torch's own does not do."""
    if given.worker_type != "process" or given.device is not None:
        raise InvalidInput(
            "worker_type='thread' and device= need a dataset of open_dataset without a sampler of your own"
        )
    leaves = [*leaves_in(loader.dataset)]
    if not leaves:
        leaves = [*hidden_in(loader.dataset)]
        if leaves:
            _warn_unshared(loader)
    if given.persistent_workers:
        for leaf in leaves:
            leaf.share_epoch()
    key_transforms(leaves, loader.seed, epoch)
    with forks_workers():
        return begin()


def _warn_unshared(loader: Foreign) -> None:
    """Of a map-style dataset of the user's own that holds one of ours where no loader looks for it."""
    own = type(loader.sampler) not in (RandomSampler, SequentialSampler) or (
        loader.batch_size is None and loader.batch_sampler is not None
    )
    processes = rank_hint()[1]
    if processes > 1 and loader.shard and not own:
        warnings.warn(
            f"each of {processes} processes sees all of {type(loader.dataset).__name__}: a dataset of open_dataset lies in"
            " another attribute than `dataset`; rename that one, give a sampler, or shard=False",
            stacklevel=4,
        )


def tell_epoch(loader: torch.utils.data.DataLoader[Any], epoch: int) -> None:
    """Tell a user's samplers of an epoch: those that want to hear it, as torch's DistributedSampler does, also inside
    a batch sampler."""
    batches = loader.batch_sampler
    samplers: tuple[Any, ...] = (loader.sampler, batches, getattr(batches, "sampler", None))
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def plan_of(dataset: Dataset, batches: Sequence[Sequence[int]]) -> Plan:
    """Which extents these batches of indices touch, and when."""
    lengths = np.fromiter(map(len, batches), np.int64, len(batches))
    step = np.repeat(np.arange(len(batches)), lengths)
    indices = places_of([index for batch in batches for index in batch], len(dataset), "sample")
    lies_in = np.searchsorted(dataset.catalog.extent_first, dataset.ids_of(indices), "right") - 1
    extent, first = np.unique(lies_in, return_index=True)
    _, last = np.unique(lies_in[::-1], return_index=True)
    order = np.argsort(first, kind="stable")
    return Plan(extent[order], step[first[order]], step[len(step) - 1 - last[order]])
