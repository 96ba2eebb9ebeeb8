"""Traces of what trainers touch: epochs of the real order function, step by step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import ExtentId
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec, ShuffleScope

MAX_TOUCHES = 100_000_000
"""Limit of the samples of an epoch; more do not end in an hour."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A dataset of equal shards, one extent each, and the job that reads it.

    A step is one global batch, shared evenly by `ranks` readers, and these by `nodes`. `window` counts extents (0: all).
    """

    shards: int = 2000
    samples_per_shard: int = 16
    shard_bytes: int = 64 << 20
    batch: int = 16
    window: int = 4
    epochs: int = 8
    ranks: int = 1
    nodes: int = 1
    seed: int = 0
    shuffle_scope: ShuffleScope = "job"

    def __post_init__(self) -> None:
        positive = (
            self.shards,
            self.samples_per_shard,
            self.shard_bytes,
            self.batch,
            self.epochs,
            self.ranks,
        )
        if min(positive) < 1 or self.window < 0:
            raise InvalidInput(
                "shards, samples, sizes, batch, epochs and ranks are 1 or more; window 0 or more"
            )
        if self.batch % self.ranks:
            raise InvalidInput(f"a batch of {self.batch} cannot be shared by {self.ranks} ranks evenly")
        if self.nodes < 1 or self.ranks % self.nodes:
            raise InvalidInput(f"{self.ranks} ranks cannot be shared by {self.nodes} nodes evenly")
        if self.shards * self.samples_per_shard < self.batch:
            raise InvalidInput(f"a batch of {self.batch} is more than all samples: an epoch has no step")
        if self.shards * self.samples_per_shard > MAX_TOUCHES:
            raise InvalidInput(f"more than {MAX_TOUCHES:,} samples: give fewer --shards or --samples")

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole dataset."""
        return self.shards * self.shard_bytes

    def extent(self, index: int) -> ExtentId:
        """The id of a shard's only extent; a product whose digits are spread like a digest's."""
        return ExtentId((index * 0x9E3779B97F4A7C15F39CC0605CEDC835 % (1 << 128)).to_bytes(16, "little"))

    def order(self, epoch: int) -> EpochOrder:
        """The order of an epoch."""
        first = np.arange(self.shards + 1, dtype=np.int64) * self.samples_per_shard
        parts = self.nodes if self.window else 1
        spec = OrderSpec(self.seed, self.batch, self.window, parts, shuffle_scope=self.shuffle_scope)
        return EpochOrder(spec, first, epoch)


@dataclass(frozen=True)
class EpochTrace:
    """One rank's epoch. `plan`: rows as the loader submits them; `steps[i]`: the extents that batch i touches."""

    plan: tuple[tuple[int, int, int], ...]
    steps: tuple[tuple[int, ...], ...]
    own: tuple[int, ...] | None = None
    """The extents that this rank's node reads in all epochs; None where these differ."""

    @cached_property
    def touched(self) -> frozenset[int]:
        """Every extent that the epoch touches."""
        return frozenset(extent for step in self.steps for extent in step)


def trace(workload: Workload, epoch: int, rank: int = 0) -> EpochTrace:
    """A rank's epoch, as `loader.DataLoader` would read it. Samples beyond full batches are left out."""
    order = workload.order(epoch)
    share = workload.batch // workload.ranks
    low, high = rank * share, (rank + 1) * share
    rows = order.plan(low, high)
    samples = order.slots(0, order.full_steps, low, high)
    steps = tuple(tuple(dict.fromkeys(row)) for row in (samples // workload.samples_per_shard).tolist())
    found, plan = order.own_extents(low, high), zip(*(column.tolist() for column in rows[:3]), strict=True)
    return EpochTrace(tuple(plan), steps, None if found is None else tuple(found.tolist()))
