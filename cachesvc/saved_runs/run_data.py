"""The data of a run over its catalogs: a dataset (`Leaf`), or what is made of datasets (`composed.py`).

All have the methods of `Leaf`. An index names a sample, in a mixture a spot, among packs a pack. The spec and the epoch
of a call are those of the order that the indices are of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.sample_places import NamedSample, places_of, samples_with_key
from cachesvc.core.order.digests import SampleSum, sum_of
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from cachesvc.core.order.excluded import parse_excluded
from cachesvc.core.order.part_layout import PartLayout, part_layout
from cachesvc.core.order.permute import Mask
from cachesvc.core.order.run import DatasetRun
from cachesvc.saved_runs.data import DataSource, identity_of
from cachesvc.saved_runs.extents import extents_of

Matching = Callable[[Ints, OrderSpec, int], Mask]
"""Tells which of some indices, in the order of a spec and an epoch, have bytes of a sample that a user named."""
ContentsIn = Callable[["Leaf", Ints], Iterable[bytes]]
"""Gives digests of the bytes of a dataset's extents, int64[m], ascending."""


class Chosen(NamedTuple):
    """Extents of a catalog, by their numbers. `leaf`: the number of the dataset among those of the run."""

    leaf: int
    numbers: Ints


class Leaf:
    """A dataset, or the part `ids` of it: the catalog's samples in the order of their indices; None for all."""

    changes: tuple[int, ...] = ()
    """The epochs from which epochs may have another length."""
    may_change = False
    """Whether a state may have another length of an epoch."""

    def __init__(self, source: DataSource, catalog: Catalog, ids: Ints | None) -> None:
        self.source, self.catalog, self.ids = source, catalog, ids
        self.leaves: tuple[Leaf, ...] = (self,)
        self._layouts: dict[bool, PartLayout] = {}

    @property
    def identity(self) -> str:
        """The state's name of the data."""
        return identity_of(self.source.version, self.ids)

    def layout(self, shuffle: bool) -> PartLayout:
        """The layout of an order of this data."""
        if shuffle not in self._layouts:
            self._layouts[shuffle] = part_layout(self.catalog.extent_first, self.ids, shuffle)
        return self._layouts[shuffle]

    def order(self, spec: OrderSpec, epoch: int) -> EpochOrder:
        """The order of an epoch of the run, by ordinals; of packs and mixtures by indices."""
        return EpochOrder(spec, self.layout(spec.shuffle).extent_first, epoch)

    def run(self, spec: OrderSpec, epoch: int) -> DatasetRun:
        """The order of an epoch of a component."""
        return DatasetRun(spec, self.layout(spec.shuffle), epoch)

    def size(self, spec: OrderSpec, epoch: int) -> int:
        """The samples of an epoch."""
        return self.catalog.samples if self.ids is None else self.ids.size

    def left_out(self, indices: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """Tell the samples that a spec excludes."""
        return parse_excluded(spec.excluded).among(indices)

    def ids_of(self, indices: Ints) -> Ints:
        """The catalog's samples of indices."""
        return indices if self.ids is None else self.ids[indices]

    def named(self, indices: Ints, spec: OrderSpec, epoch: int) -> list[NamedSample]:
        """The names and places of samples."""
        samples = self.ids_of(indices)
        places = places_of(self.catalog, samples) if samples.size else []
        pairs = zip(samples.tolist(), places, strict=True)
        return [NamedSample(self.catalog.key(sample), where) for sample, where in pairs]

    def sum(self, indices: Ints, spec: OrderSpec, epoch: int, contents_of: ContentsIn) -> SampleSum:
        """The sum over samples in a run's digest."""
        return sum_of(self.ids_of(indices), self.catalog.extent_first, partial(contents_of, self))

    def extents(self, indices: Ints, spec: OrderSpec, epoch: int) -> Iterator[Chosen]:
        """The extents of each catalog, ascending, with those into which samples continue."""
        yield Chosen(0, extents_of(self.catalog, self.ids_of(indices)))

    def with_key(self, key: str) -> Ints:
        """The indices of the samples of a key."""
        samples = np.array(samples_with_key(self.catalog, key), np.int64)
        return samples if self.ids is None else np.flatnonzero(np.isin(self.ids, samples))

    def matching(self, key: str) -> Matching | None:
        """Tell samples that have bytes of the sample of a key. None where no sample has the key."""
        wanted = self.with_key(key)
        return (lambda indices, spec, epoch: np.isin(indices, wanted)) if wanted.size else None
