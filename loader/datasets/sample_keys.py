"""Finds samples of a user's dataset by their keys in the source, and names samples and the objects that hold them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachesvc.catalog.sample_places import NamedSample, places_of, samples_with_key
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import OrderSpec
from loader.datasets.dataset import Dataset
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.wrapped import as_view, key_at, parts_at
from loader.reading.reader import Ints


def indices_of_keys(dataset: object, keys: Sequence[str]) -> tuple[int, ...]:
    """The numbers by which an order knows all samples with these keys, or documents of packs: their indices, ascending. In
    a mixture of n components, sample i of component c has the number i * n + c.

    Raises InvalidInput for a key that no sample has, and for datasets of the user's own, whose samples have no keys.
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


def named_in(dataset: object, indices: Ints, spec: OrderSpec, epoch: int) -> list[NamedSample]:
    """Name the samples of indices; those of a dataset that indexes in its own way have no places."""
    if isinstance(dataset, Packed):
        return dataset.named(indices, spec, epoch)
    if isinstance(dataset, Mixture):
        by_row: dict[int, NamedSample] = {}
        for rows, index, own, own_epoch, inner in dataset.groups(indices, spec):
            named = named_in(dataset.components[index], inner, own, own_epoch)
            by_row.update(zip(rows.tolist(), named, strict=True))
        return [by_row[row] for row in range(indices.size)]
    view = as_view(dataset)
    if view is not None:
        places = places_of(view.catalog, view.ids_of(indices))
        pairs = zip(indices.tolist(), places, strict=True)
        return [NamedSample(key_at(view, index), where) for index, where in pairs]
    found = []
    for index in indices.tolist():
        parts = (
            place
            for part, inner in parts_at(dataset, index)
            for place in named_in(part, np.array([inner], np.int64), spec, epoch)[0].places
        )
        found.append(NamedSample(key_at(dataset, index), tuple(dict.fromkeys(parts))))
    return found


def _keyed_parts(dataset: object) -> Sequence[Dataset | Packed]:
    if isinstance(dataset, Mixture):
        return dataset.components
    if isinstance(dataset, Packed):
        return [dataset]
    if (view := as_view(dataset)) is not None:
        return [view]
    raise InvalidInput(
        f"exclude= names samples of open_dataset by their keys, and those of {type(dataset).__name__} have none: give a "
        "part of the dataset instead (where, select)"
    )


def _indices_in(view: Dataset | Packed, key: str) -> Ints:
    if isinstance(view, Packed):
        return view.documents_with_key(key)
    samples = np.array(samples_with_key(view.catalog, key), np.int64)
    return samples if view.ids is None else np.flatnonzero(np.isin(view.ids, samples))
