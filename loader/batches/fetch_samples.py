"""Fetches a batch's samples one at a time, so that the memory of one is free for the next.

Views of `open_dataset` are read in one pass, also inside ConcatDataset, StackDataset and Subset, whose own code
would ask for samples one by one. Any other dataset is indexed as torch does it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset

from cachesvc.core.arguments import places_of
from loader.datasets.dataset import current_rng_key
from loader.datasets.wrapped import MAX_DEPTH, as_view
from loader.reading.reader import Ints

FetchSamples = Callable[[Ints, tuple[int, int]], Iterator[Any]]
"""Takes indices and the (seed, epoch) that transforms draw from; returns the samples."""


def sample_fetcher(dataset: Any, depth: int = MAX_DEPTH) -> FetchSamples:
    """Return the function that fetches samples of a dataset in its present state. Raises IndexError for a Subset
    with an index out of range."""
    view = as_view(dataset)
    if view is not None:
        return lambda indices, rng_key: view.sample_reader.iter_samples(
            view.opened.reader(), view.ids_of(indices), rng_key
        )
    kind = type(dataset) if depth else None
    if kind is ConcatDataset:
        ends = np.asarray(dataset.cumulative_sizes, np.int64)
        return _concatenated([sample_fetcher(part, depth - 1) for part in dataset.datasets], ends)
    if kind is StackDataset and isinstance(dataset.datasets, dict):
        named = _stacked([sample_fetcher(part, depth - 1) for part in dataset.datasets.values()])
        names = tuple(dataset.datasets)
        return lambda indices, rng_key: (
            dict(zip(names, each, strict=True)) for each in named(indices, rng_key)
        )
    if kind is StackDataset:
        return _stacked([sample_fetcher(part, depth - 1) for part in dataset.datasets])
    if kind is Subset and type(dataset.dataset) in (ConcatDataset, StackDataset, Subset):
        inner = sample_fetcher(dataset.dataset, depth - 1)
        places = places_of(dataset.indices, len(dataset.dataset), "sample")
        return lambda indices, rng_key: inner(places[indices], rng_key)
    return lambda indices, rng_key: _fetch_as_torch(dataset, indices.tolist(), rng_key)


def _concatenated(parts: list[FetchSamples], ends: Ints) -> FetchSamples:
    def fetch(indices: Ints, rng_key: tuple[int, int]) -> Iterator[Any]:
        part_of = np.searchsorted(ends, indices, side="right")
        begins = np.concatenate([np.zeros(1, np.int64), ends])[part_of]
        samples_of = {
            part: parts[part]((indices - begins)[part_of == part], rng_key)
            for part in np.unique(part_of).tolist()
        }
        return (next(samples_of[part]) for part in part_of.tolist())

    return fetch


def _stacked(parts: list[FetchSamples]) -> FetchSamples:
    return lambda indices, rng_key: zip(*(part(indices, rng_key) for part in parts), strict=True)


def _fetch_as_torch(dataset: Any, indices: list[int], rng_key: tuple[int, int]) -> Iterator[Any]:
    if getattr(dataset, "__getitems__", None):  # a class may set it to None, as torch allows
        return iter(_call_keyed(dataset.__getitems__, indices, rng_key))
    return (_call_keyed(lambda at: dataset[at], index, rng_key) for index in indices)


def _call_keyed(call: Callable[[Any], Any], argument: Any, rng_key: tuple[int, int]) -> Any:
    """Call with `rng_key` as this thread's key for transforms."""
    token = current_rng_key.set(rng_key)
    try:
        return call(argument)
    finally:
        current_rng_key.reset(token)
