"""A loader's arguments -> the spec of the order, and this rank's share of it: its feed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import numpy as np
from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.core.model import DEFAULT_WINDOW_BYTES
from cachesvc.core.order.epoch_order import Last, OrderSpec, ShuffleScope, window_extents
from cachesvc.core.order.excluded import Excluded
from cachesvc.core.order.skipped import skipped_by
from cachesvc.core.order.state import LoaderState
from loader.batches.feed import Feed
from loader.datasets.mixture import Mixture, with_run_edges
from loader.datasets.packing import Packed
from loader.datasets.wrapped import CacheDataset
from loader.job.topology import ALONE, RankShare, Topology, resolve
from loader.saved_state import edges_of, resumed

Window = Literal["auto", "all"] | int


def window_bytes(window: Window) -> int:
    """A window in bytes; 0 means everything. Raises InvalidInput."""
    if isinstance(window, str):
        if window not in ("auto", "all"):
            raise InvalidInput(f"window={window!r} is neither a size in bytes, 'auto' nor 'all'")
        return DEFAULT_WINDOW_BYTES if window == "auto" else 0
    return whole_number("window", window, 1, 2**63 - 1)


@dataclass(frozen=True, slots=True)
class OrderArguments:
    """The arguments of a loader that define the samples of each batch of each rank."""

    dataset: TorchDataset[Any]
    batch_size: int | None
    collate_fn: Callable[[Any], Any]
    drop_last: bool
    shuffle: bool
    seed: int
    epochs: int | None
    global_batch_size: int | None
    last: Last | None
    window: Window | None
    shuffle_scope: ShuffleScope | None
    skip_steps: Sequence[tuple[int, int]]
    excluded: Sequence[int]
    rank: int | None
    world_size: int | None
    mesh: Any
    dp_dims: tuple[str, ...]
    shard: bool

    @classmethod
    def of(cls, loader: Any) -> OrderArguments:
        """The arguments of `loader` as they are now."""
        return cls(*(getattr(loader, field.name) for field in fields(cls)))

    def topology(self) -> Topology:
        """The rank's place in the job. Raises InvalidInput."""
        return resolve(self.rank, self.world_size, self.mesh, self.dp_dims) if self.shard else ALONE


def _single(convert: Callable[[Any], Any], samples: list[Any]) -> Any:
    """Collate a batch of one into a sample, as torch does without a batch size: `convert` gets the sample alone."""
    (sample,) = samples
    return convert(sample)


def feed_of(
    given: OrderArguments, core: CacheDataset, topology: Topology, state: LoaderState | None, epoch: int
) -> Feed:
    """This rank's batches; those of the saved run, if a state is given. Raises InvalidInput, StateMismatch, also for an
    order that `epoch` cannot have."""
    batch_size, collate = given.batch_size, given.collate_fn
    if batch_size is None:
        batch_size, collate = 1, partial(_single, collate)
    spec = spec_of(given, batch_size, core, topology)
    dataset = given.dataset
    if state is not None:
        spec = resumed(state, spec, _given_names(given))
        dataset = with_run_edges(dataset, edges_of(state))
    share = share_of(spec.global_batch, batch_size, topology)
    feed = Feed(dataset, spec, share, collate)
    feed.order(epoch)
    return feed


def spec_of(given: OrderArguments, batch_size: int, core: CacheDataset, topology: Topology) -> OrderSpec:
    """The order of a loader's arguments. Raises InvalidInput."""
    if given.drop_last and given.last not in (None, "drop"):
        raise InvalidInput(f"drop_last=True contradicts last={given.last!r}; give one of them")
    wanted, scope = given.global_batch_size or batch_size * topology.world_size, given.shuffle_scope or "job"
    if scope == "node" and (isinstance(core, (Mixture, Packed)) or not given.shuffle):
        raise InvalidInput(
            "shuffle_scope='node' needs shuffle=True, and no mixture or packs, which are drawn from all data in each epoch"
        )
    sizes = np.concatenate([leaf.catalog.extent_sizes for leaf in core.leaves])
    return OrderSpec(
        seed=given.seed,
        global_batch=wanted,
        window_extents=window_extents(sizes, window_bytes(given.window or "auto")),
        canonical_nodes=1 if given.window == "all" and scope == "job" else min(topology.nodes, wanted),
        shuffle=given.shuffle,
        last=given.last or ("drop" if given.drop_last else "short"),
        skipped=skipped_by(given.skip_steps).text,
        excluded=Excluded(dict.fromkeys(given.excluded, 0)).text,
        shuffle_scope=scope,
    )


def share_of(global_batch: int, batch_size: int, topology: Topology) -> RankShare:
    """This rank's slots of a global batch. Raises InvalidInput when batches do not divide it."""
    world = topology.world_size
    if batch_size < 1 or global_batch % (batch_size * world):
        raise InvalidInput(
            f"a global batch of {global_batch} is no multiple of {world} ranks x {batch_size} samples; choose "
            f"batch_size x {world} to divide it, or another global_batch_size (of a saved run: at an epoch's beginning)"
        )
    width = global_batch // world
    return RankShare(topology.rank * width, (topology.rank + 1) * width, batch_size)


def _given_names(given: OrderArguments) -> set[str]:
    """The fields of OrderSpec that were given as arguments, and that may differ from a saved run's."""
    names = {
        "global_batch": given.global_batch_size is not None,
        "window_extents": given.window is not None,
        "last": given.last is not None or given.drop_last,
        "shuffle_scope": given.shuffle_scope is not None,
    }
    return {name for name, is_given in names.items() if is_given}
