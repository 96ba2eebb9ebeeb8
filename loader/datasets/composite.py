"""What a mixture needs of its components, and what the feed needs of a mixture or of packs: a run, and samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec, Touches, subset_first
from cachesvc.core.order.run import Run
from loader.datasets.collate import default_collate_into
from loader.datasets.dataset import Dataset
from loader.datasets.shape_mismatch import Name, unnamed
from loader.reading.reader import Ints


class Component(Protocol):
    """A dataset as a run of spots for each epoch; `spec` gives seed, window and shuffle, the batches are not its
    matter."""

    @property
    def leaf(self) -> Dataset: ...

    def __len__(self) -> int: ...

    def run(self, spec: OrderSpec, epoch: int) -> Run: ...

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]: ...

    def collate(self, samples: Sequence[Any], name: Name = unnamed) -> Any: ...


class Spread(NamedTuple):
    """How a dataset's samples lie in extents: the first ordinal of each extent, and the index of each ordinal
    (None: the same). `planned`: the extents are the catalog's."""

    extent_first: Ints
    arrange: Ints | None
    planned: bool


def spread_of(dataset: Dataset, shuffle: bool) -> Spread:
    """Where the samples of a view lie. Unshuffled indices in an order of their own count as one extent."""
    first, ids = dataset.catalog.extent_first, dataset.ids
    if ids is None:
        return Spread(first, None, True)
    if len(ids) < 2 or (ids[1:] >= ids[:-1]).all():
        return Spread(subset_first(first, ids), None, True)
    if not shuffle:
        return Spread(np.asarray([0, len(ids)], np.int64), None, False)
    arrange = np.argsort(ids, kind="stable")
    return Spread(subset_first(first, ids[arrange]), arrange, True)


def without_parts(made: str) -> Callable[..., NoReturn]:
    """In place of a method that makes part of a dataset, for what `made` makes of datasets. Raises InvalidInput."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise InvalidInput(
            f"{made}() draws anew in each epoch, so it has no parts of its own: where(), select(), take() or split() "
            f"the datasets first, then {made}() the parts"
        )

    return refuse


def alone(spec: OrderSpec) -> OrderSpec:
    """The spec of one dataset's own run, dealt to nobody."""
    return replace(spec, global_batch=1, canonical_nodes=1, last="drop")


class _ViewRun:
    """One epoch of a plain dataset; spots are its indices."""

    def __init__(self, spread: Spread, spec: OrderSpec, epoch: int) -> None:
        self._spread = spread
        self._order = EpochOrder(alone(spec), spread.extent_first, epoch)

    @property
    def size(self) -> int:
        return self._order.samples

    def at(self, positions: Ints) -> Ints:
        found = self._order.at(positions)
        return found if self._spread.arrange is None else self._spread.arrange[found]

    def touches(self) -> list[Touches]:
        if self._spread.planned:
            return [self._order.touches()]
        return [Touches(*(np.empty(0, np.int64) for _ in range(3)))]


class Plain:
    """A plain dataset as a component."""

    def __init__(self, dataset: Dataset) -> None:
        self.leaf = dataset
        self._spreads: dict[bool, Spread] = {}

    def __len__(self) -> int:
        return len(self.leaf)

    def run(self, spec: OrderSpec, epoch: int) -> Run:
        """The dataset's own epoch."""
        if spec.shuffle not in self._spreads:
            self._spreads[spec.shuffle] = spread_of(self.leaf, spec.shuffle)
        return _ViewRun(self._spreads[spec.shuffle], spec, epoch)

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]:
        """Samples; their generators are keyed by (seed, own epoch, sample)."""
        leaf = self.leaf
        return leaf.samples.take(leaf.opened.reader(), leaf.ids_of(spots), (spec.seed, epoch))

    def collate(self, samples: Sequence[Any], name: Name = unnamed) -> Any:
        """torch's own."""
        return default_collate_into(None, samples, len(samples), name)
