"""Runs a loader as torch alone does, with a sampler of the user's over a dataset of `open_dataset`.

torch's own samplers draw a whole epoch at its beginning, so their draws become the plan and the daemon reads ahead.
Other samplers may depend on what training does meanwhile: they are iterated batch by batch, as in torch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data.distributed import DistributedSampler

from cachesvc.core.arguments import places_of
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import Plan
from cachesvc.system.fork_hooks import forks_workers
from loader.datasets.dataset import Dataset, key_transforms
from loader.datasets.wrapped import as_view, hidden_leaves_in, leaves_in
from loader.job.topology import rank_hint
from loader.samplers import RankBatchSampler
from loader.workers.settings import WorkerSettings

_PLANNABLE = (
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    DistributedSampler,
)
MAX_PLANNED = 1_000_000
"""Samples per epoch that are drawn in advance; this many take 0.35 s and 95 MB for a moment. Longer epochs are
drawn batch by batch."""


class PlannedBatches:
    """The batches of `sampler`, drawn and planned when an epoch begins, then yielded unchanged."""

    def __init__(self, sampler: BatchSampler, dataset: TorchDataset[Any], lag: int) -> None:
        """`lag`: batches that may be requested before one has been consumed."""
        self._sampler, self._dataset, self._lag = sampler, dataset, lag

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[list[int]]:
        view = as_view(self._dataset)
        if view is None or len(self._sampler) * self._sampler.batch_size > MAX_PLANNED:
            yield from self._sampler
            return
        batches, plan = self._draw(view)
        if plan is None:
            yield from batches
            return
        opened = view.opened
        opened.submit(plan, self)
        try:
            for step, batch in enumerate(batches):
                opened.passed(max(0, step - self._lag), self)
                yield batch
            opened.passed(len(self._sampler), self)
        finally:
            opened.given_up(self)

    def _draw(self, view: Dataset) -> tuple[Iterable[list[int]], Plan | None]:
        """Return the batches and their plan. The plan is None if an index is out of range, which is raised when the
        sample is read."""
        generator: torch.Generator | None = getattr(self._sampler.sampler, "generator", None)
        batches: Iterable[list[int]]
        if generator is None:
            planned = batches = list(self._sampler)
        else:  # a user's generator is drawn from again while yielding, so that after a break its state is as in torch
            before = generator.get_state()
            planned, batches = list(self._sampler), self._sampler
            generator.set_state(before)
        try:
            return batches, plan_of(view, planned) if planned else None
        except (IndexError, TypeError):
            return batches, None


def planned_batches(sampler: Any, dataset: TorchDataset[Any], lag: int) -> Any:
    """Return the sampler, wrapped in PlannedBatches if its batches are known in advance."""
    known = type(sampler) in (BatchSampler, RankBatchSampler) and type(sampler.sampler) in _PLANNABLE
    return PlannedBatches(sampler, dataset, lag) if known else sampler


def why_as_torch(dataset: TorchDataset[Any]) -> str:
    """Explain why torch alone runs a loader over this dataset."""
    if not isinstance(dataset, IterableDataset) and any(True for _ in leaves_in(dataset)):
        cause = "it was given a sampler; leave the sampler out for a state and an order of ours"
    else:
        cause = f"{type(dataset).__name__} is not a map-style dataset of open_dataset and holds none"
    return f"this DataLoader runs as torch's own because {cause}"


def why_stateless(dataset: TorchDataset[Any]) -> str:
    """Explain why such a loader has no state where torchdata is not installed."""
    return (
        f"{why_as_torch(dataset)}. Without torchdata (pip install torchdata) its state is empty, and a resumed epoch begins"
        " anew"
    )


def begin_as_torch(
    loader: Any, settings: WorkerSettings, epoch: int, begin: Callable[[], Iterator[Any]]
) -> Iterator[Any]:
    """Begin an iteration of torch's own loader. Transforms draw from the loader's seed and this epoch. Raises
    InvalidInput for settings that torch does not have."""
    if settings.worker_type != "process" or settings.device is not None:
        raise InvalidInput(
            "worker_type='thread' and device= need a dataset of open_dataset without a sampler of your own"
        )
    found = [*leaves_in(loader.dataset)]
    leaves = found or [*hidden_leaves_in(loader.dataset)]
    if leaves and (not found or isinstance(loader.dataset, IterableDataset)):
        _warn_unshared(loader)
    if settings.persistent_workers:
        for leaf in leaves:
            leaf.share_epoch()
    key_transforms(leaves, loader.seed, epoch)
    with forks_workers():
        return begin()


def _warn_unshared(loader: Any) -> None:
    """Warn if a user's dataset holds one of `open_dataset` that no loader divides among ranks: in an attribute where the
    loader does not look for it, or under an iterable dataset, which has no order to divide."""
    iterable, processes = isinstance(loader.dataset, IterableDataset), rank_hint()[1]
    own = type(loader.sampler) not in (RandomSampler, SequentialSampler) or (
        loader.batch_size is None and loader.batch_sampler is not None
    )
    if processes > 1 and loader.shard and (iterable or not own):
        cause, remedy = (
            ("it is an IterableDataset over", "make it map-style (__getitem__), divide its samples by rank")
            if iterable
            else ("it holds", "rename the attribute to `dataset`, give a sampler")
        )
        warnings.warn(
            f"each of {processes} processes sees all of {type(loader.dataset).__name__}: {cause} a dataset of"
            f" open_dataset; {remedy}, or give shard=False",
            stacklevel=4,
        )


def set_sampler_epoch(loader: torch.utils.data.DataLoader[Any], epoch: int) -> None:
    """Call `set_epoch` of a user's samplers that have it, as torch's DistributedSampler does, also inside a batch
    sampler."""
    batches = loader.batch_sampler
    samplers: tuple[Any, ...] = (loader.sampler, batches, getattr(batches, "sampler", None))
    for sampler in samplers:
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def plan_of(dataset: Dataset, batches: Sequence[Sequence[int]]) -> Plan:
    """Plan which extents these batches of indices read, and in which steps."""
    lengths = np.fromiter(map(len, batches), np.int64, len(batches))
    step = np.repeat(np.arange(len(batches)), lengths)
    indices = places_of([index for batch in batches for index in batch], len(dataset), "sample")
    extent_of = np.searchsorted(dataset.opened.catalog.extent_first, dataset.ids_of(indices), "right") - 1
    extent, first = np.unique(extent_of, return_index=True)
    _, last = np.unique(extent_of[::-1], return_index=True)
    order = np.argsort(first, kind="stable")
    return Plan(extent[order], step[first[order]], step[len(step) - 1 - last[order]])
