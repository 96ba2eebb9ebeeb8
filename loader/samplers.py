"""The `sampler` and `batch_sampler` of our DataLoader: the indices of its batches.

Other programs build their own loaders from these (Accelerate's `skip_first_batches`, and through it the Trainer of
Hugging Face), or check their types: a DistributedSampler is sharded already, a SequentialSampler does not shuffle.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import Any

from torch.utils.data import BatchSampler, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from loader.rank_order import RankOrder


class RankSampler(DistributedSampler[Any]):
    """This rank's indices: those of its batches, concatenated. Iterating does not move the loader."""

    def __init__(self, order: RankOrder) -> None:
        given = order.arguments
        self.order, self.dataset = order, given.dataset
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

    @property
    def data_source(self) -> Any:  # type: ignore[override]
        """The dataset."""
        return self.dataset


class RankRandomSampler(RankSampler, RandomSampler):
    """The sampler of a loader that shuffles."""

    replacement, generator = False, None

    @property
    def data_source(self) -> Any:  # type: ignore[override]
        """The dataset."""
        return self.dataset


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
        return (
            self.sampler.order.turns(self.repeats)
            if isinstance(self.sampler, RankSampler)
            else super().__len__()
        )

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
