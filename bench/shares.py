"""`python -m bench shares`: how evenly samples are left out, repeated and given to nodes over 200 epochs, beside torch.

1,000 samples. The count of a sample is binomial if all samples are equally likely in each epoch. Each cell has the standard
deviation of the counts of all samples, the lowest and the highest count, and how many samples have none. The seeds are
fixed, so the table is the same everywhere. A test compares it with docs/measured.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DistributedSampler, RandomSampler

from bench.grid import Grid
from cachesvc.core.order.epoch_order import EpochOrder, Last, OrderSpec

SAMPLES, EPOCHS, BATCH, NODES, SEED = 1000, 200, 96, 2, 7
LAYOUTS = {
    "one extent": (1000,),
    "three extents": (334, 333, 333),
    "extents of 10, 40, 350 and 600": (10, 40, 350, 600),
}
Counts = npt.NDArray[np.int64]


def grid() -> Grid:
    """A row for each layout of the data, and one for torch."""
    rows = [(name, *map(_cell, counts(sizes))) for name, sizes in LAYOUTS.items()]
    rows.append(("torch's samplers", *map(_cell, counts_of_torch())))
    shares = (SAMPLES % BATCH / SAMPLES, _repeats() / SAMPLES, SAMPLES // BATCH * BATCH / NODES / SAMPLES)
    rows.append(("binomial", *(f"{_deviation(share):.1f}" for share in shares)))
    left, repeated, given = (f"{EPOCHS * share:g}" for share in shares)
    head = (
        "standard deviation: lowest to highest (samples with none)",
        f"left out, {left} expected",
        f"repeated, {repeated} expected",
        f"given to the first of {NODES} nodes, {given} expected",
    )
    return Grid(f"Counts of each of {SAMPLES:,} samples in {EPOCHS} epochs, batches of {BATCH}", head, rows)


def counts(sizes: Iterable[int]) -> tuple[Counts, Counts, Counts]:
    """How often each sample is dropped, repeated under `last="pad"`, and given to the first node."""
    extent_first = np.cumsum([0, *sizes])

    def order(last: Last, epoch: int) -> EpochOrder:
        return EpochOrder(OrderSpec(SEED, BATCH, 4, NODES, True, last), extent_first, epoch)

    def left_out(epoch: int) -> Counts:
        dropping = order("drop", epoch)
        return np.setdiff1d(np.arange(SAMPLES), dropping.slots(0, dropping.full_steps, 0, BATCH))

    def repeated(epoch: int) -> Counts:
        samples, valid = order("pad", epoch).tail(0, BATCH)
        return samples[0, valid[0] :]

    def first_node(epoch: int) -> Counts:
        dropping = order("drop", epoch)
        return dropping.slots(0, dropping.full_steps, 0, BATCH // NODES).reshape(-1)

    return _counted(left_out), _counted(repeated), _counted(first_node)


def counts_of_torch() -> tuple[Counts, Counts, Counts]:
    """The same of torch's RandomSampler and DistributedSampler. The latter repeats samples up to a multiple of its
    replicas, so it gets a replica for each sample of a batch."""
    data = range(SAMPLES)
    random = RandomSampler(data, generator=torch.Generator().manual_seed(SEED))
    every = _drawn(BATCH)

    def left_out(_: int) -> Counts:
        return np.asarray([*random][SAMPLES // BATCH * BATCH :])

    def repeated(epoch: int) -> Counts:
        found = np.bincount(np.concatenate([_of_sampler(each, epoch) for each in every]), minlength=SAMPLES)
        return np.flatnonzero(found > 1)

    def first_node(epoch: int) -> Counts:
        return _of_sampler(_drawn(NODES)[0], epoch)[: SAMPLES // BATCH * BATCH // NODES]

    return _counted(left_out), _counted(repeated), _counted(first_node)


def _drawn(replicas: int) -> list[DistributedSampler[int]]:
    data: torch.utils.data.Dataset[int] = range(SAMPLES)  # type: ignore[assignment]
    return [DistributedSampler(data, replicas, rank, shuffle=True, seed=SEED) for rank in range(replicas)]


def _of_sampler(sampler: DistributedSampler[int], epoch: int) -> Counts:
    sampler.set_epoch(epoch)
    return np.fromiter(sampler, np.int64)


def _counted(samples_of: Callable[[int], Counts]) -> Counts:
    return np.bincount(np.concatenate([samples_of(epoch) for epoch in range(EPOCHS)]), minlength=SAMPLES)


def _repeats() -> int:
    return -SAMPLES % BATCH


def _deviation(share: float) -> float:
    return float(np.sqrt(EPOCHS * share * (1 - share)))


def _cell(found: Counts) -> str:
    return f"{found.std():.1f}: {found.min()} to {found.max()} ({(found == 0).sum()})"
