"""Finds samples of a user's dataset by their keys in the source, and the objects that hold samples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachesvc.catalog.sample_places import SamplePlace, places_of, samples_with_key
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import OrderSpec
from loader.datasets.dataset import Dataset
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.wrapped import as_view, parts_at
from loader.reading.reader import Ints


def indices_of_keys(dataset: object, keys: Sequence[str]) -> tuple[int, ...]:
    """The indices of all samples with these keys, ascending; in a mixture the spots of each component's first own epoch.

    Raises InvalidInput for a key that no sample has, and for packs and datasets of the user's own, whose samples have no
    keys.
    """
    if not keys:
        return ()
    parts = _keyed_parts(dataset)
    found: list[Ints] = []
    for key in keys:
        among = [_indices_in(part, key) * len(parts) + number for number, part in enumerate(parts)]
        if not any(each.size for each in among):
            raise InvalidInput(f"exclude: no sample has the key {key[:80]!r}; samples_of(step) shows keys")
        found += among
    return tuple(np.unique(np.concatenate(found)).tolist())


def places_in(dataset: object, indices: Ints, spec: OrderSpec, epoch: int) -> list[tuple[SamplePlace, ...]]:
    """Return where the samples of indices are stored; () for each sample of a dataset that indexes in its own way."""
    if isinstance(dataset, Packed):
        return dataset.places(indices, spec, epoch)
    if isinstance(dataset, Mixture):
        by_row: dict[int, tuple[SamplePlace, ...]] = {}
        for rows, index, own, own_epoch, inner in dataset.groups(indices, spec):
            stored = places_in(dataset.components[index], inner, own, own_epoch)
            by_row.update(zip(rows.tolist(), stored, strict=True))
        return [by_row[row] for row in range(indices.size)]
    view = as_view(dataset)
    if view is not None:
        return places_of(view.catalog, view.ids_of(indices))
    found = []
    for index in indices.tolist():
        places = (
            place
            for part, inner in parts_at(dataset, index)
            for place in places_in(part, np.array([inner], np.int64), spec, epoch)[0]
        )
        found.append(tuple(dict.fromkeys(places)))
    return found


def _keyed_parts(dataset: object) -> list[Dataset]:
    if isinstance(dataset, Mixture):
        if all(isinstance(part, Dataset) for part in dataset.components):
            return [part for part in dataset.components if isinstance(part, Dataset)]
    elif (view := as_view(dataset)) is not None:
        return [view]
    raise InvalidInput(
        f"exclude= names samples of open_dataset by their keys, and those of {type(dataset).__name__} have none: give a "
        "part of the dataset instead (where, select)"
    )


def _indices_in(view: Dataset, key: str) -> Ints:
    samples = np.array(samples_with_key(view.catalog, key), np.int64)
    return samples if view.ids is None else np.flatnonzero(np.isin(view.ids, samples))
