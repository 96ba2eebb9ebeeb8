"""A batch's samples, one after the other, so that what made one is free for the next: of views of ours read at once, also
inside ConcatDataset, StackDataset and Subset, whose own code asks for them one by one; all else is asked as torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset

from cachesvc.core.arguments import places_of
from loader.datasets.dataset import drawing
from loader.datasets.wrapped import MAX_DEPTH, flattened
from loader.reading.reader import Ints

Drawn = Callable[[Ints, tuple[int, int]], Iterator[Any]]
"""Samples of these indices, whose transforms draw from (seed, epoch)."""


def drawn_from(dataset: Any, depth: int = MAX_DEPTH) -> Drawn:
    """What gives samples of a dataset as it is now. Raises IndexError for a Subset of samples that are not there."""
    view = flattened(dataset)
    if view is not None:
        return lambda indices, draw: view.samples.drawn(view.opened.reader(), view.ids_of(indices), draw)
    kind = type(dataset) if depth else None
    if kind is ConcatDataset:
        ends = np.asarray(dataset.cumulative_sizes, np.int64)
        return _behind([drawn_from(part, depth - 1) for part in dataset.datasets], ends)
    if kind is StackDataset and isinstance(dataset.datasets, dict):
        named = _beside([drawn_from(part, depth - 1) for part in dataset.datasets.values()])
        names = tuple(dataset.datasets)
        return lambda indices, draw: (dict(zip(names, each, strict=True)) for each in named(indices, draw))
    if kind is StackDataset:
        return _beside([drawn_from(part, depth - 1) for part in dataset.datasets])
    if kind is Subset and type(dataset.dataset) in (ConcatDataset, StackDataset, Subset):
        inner = drawn_from(dataset.dataset, depth - 1)
        places = places_of(dataset.indices, len(dataset.dataset), "sample")
        return lambda indices, draw: inner(places[indices], draw)
    return lambda indices, draw: _as_torch(dataset, indices.tolist(), draw)


def _behind(parts: list[Drawn], ends: Ints) -> Drawn:
    def drawn(indices: Ints, draw: tuple[int, int]) -> Iterator[Any]:
        part_of = np.searchsorted(ends, indices, side="right")
        begins = np.concatenate([np.zeros(1, np.int64), ends])[part_of]
        of_part = {
            part: parts[part]((indices - begins)[part_of == part], draw)
            for part in np.unique(part_of).tolist()
        }
        return (next(of_part[part]) for part in part_of.tolist())

    return drawn


def _beside(parts: list[Drawn]) -> Drawn:
    return lambda indices, draw: zip(*(part(indices, draw) for part in parts), strict=True)


def _as_torch(dataset: Any, indices: list[int], draw: tuple[int, int]) -> Iterator[Any]:
    if getattr(dataset, "__getitems__", None):  # None is how a class takes it away, as torch has it
        return iter(_asked(dataset.__getitems__, indices, draw))
    return (_asked(lambda at: dataset[at], index, draw) for index in indices)


def _asked(ask: Callable[[Any], Any], what: Any, draw: tuple[int, int]) -> Any:
    """What `ask` answers while this thread draws from `draw`."""
    token = drawing.set(draw)
    try:
        return ask(what)
    finally:
        drawing.reset(token)
