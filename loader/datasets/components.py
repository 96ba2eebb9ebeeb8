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
from loader.datasets.shape_mismatch import SampleName, name_by_place
from loader.reading.reader import Ints


class Component(Protocol):
    """A dataset as a run of spots for each epoch; `spec` gives seed, window and shuffle, the batches are not its
    matter."""

    @property
    def leaf(self) -> Dataset: ...

    def __len__(self) -> int: ...

    def run(self, spec: OrderSpec, epoch: int) -> Run: ...

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]: ...

    def collate(self, samples: Sequence[Any], name: SampleName = name_by_place) -> Any: ...


class ViewLayout(NamedTuple):
    """How a dataset's samples lie in extents: the first ordinal of each extent, and the index of each ordinal
    (None: the same). `planned`: the extents are the catalog's."""

    extent_first: Ints
    index_of: Ints | None
    extents_known: bool


def view_layout(dataset: Dataset, shuffle: bool) -> ViewLayout:
    """Where the samples of a view lie. Unshuffled indices in an order of their own count as one extent."""
    first, ids = dataset.catalog.extent_first, dataset.ids
    if ids is None:
        return ViewLayout(first, None, True)
    if len(ids) < 2 or (ids[1:] >= ids[:-1]).all():
        return ViewLayout(subset_first(first, ids), None, True)
    if not shuffle:
        return ViewLayout(np.asarray([0, len(ids)], np.int64), None, False)
    index_of = np.argsort(ids, kind="stable")
    return ViewLayout(subset_first(first, ids[index_of]), index_of, True)


def refuse_subsets(made: str) -> Callable[..., NoReturn]:
    """In place of a method that makes part of a dataset, for what `made` makes of datasets. Raises InvalidInput."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise InvalidInput(
            f"{made}() draws anew in each epoch, so it has no parts of its own: where(), select(), take() or split() "
            f"the datasets first, then {made}() the parts"
        )

    return refuse


def component_spec(spec: OrderSpec) -> OrderSpec:
    """The spec of one dataset's own run, dealt to nobody."""
    return replace(spec, global_batch=1, canonical_nodes=1, last="drop")


class _DatasetRun:
    """One epoch of a plain dataset; spots are its indices."""

    def __init__(self, layout: ViewLayout, spec: OrderSpec, epoch: int) -> None:
        self._layout = layout
        self._order = EpochOrder(component_spec(spec), layout.extent_first, epoch)

    @property
    def size(self) -> int:
        return self._order.samples

    def at(self, positions: Ints) -> Ints:
        found = self._order.at(positions)
        return found if self._layout.index_of is None else self._layout.index_of[found]

    def touches(self) -> list[Touches]:
        if self._layout.extents_known:
            return [self._order.touches()]
        return [Touches(*(np.empty(0, np.int64) for _ in range(3)))]


class DatasetComponent:
    """A plain dataset as a component."""

    def __init__(self, dataset: Dataset) -> None:
        self.leaf = dataset
        self._layouts: dict[bool, ViewLayout] = {}

    def __len__(self) -> int:
        return len(self.leaf)

    def run(self, spec: OrderSpec, epoch: int) -> Run:
        """The dataset's own epoch."""
        if spec.shuffle not in self._layouts:
            self._layouts[spec.shuffle] = view_layout(self.leaf, spec.shuffle)
        return _DatasetRun(self._layouts[spec.shuffle], spec, epoch)

    def read(self, spots: Ints, spec: OrderSpec, epoch: int) -> list[Any]:
        """Samples; their generators are keyed by (seed, own epoch, sample)."""
        leaf = self.leaf
        return leaf.samples.take(leaf.opened.reader(), leaf.ids_of(spots), (spec.seed, epoch))

    def collate(self, samples: Sequence[Any], name: SampleName = name_by_place) -> Any:
        """torch's own."""
        return default_collate_into(None, samples, len(samples), name)
