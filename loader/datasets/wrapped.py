"""Our datasets inside what torch and users put around them: Subset, ConcatDataset, StackDataset, or what holds one in
`.dataset`."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset
from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.arguments import places_of
from cachesvc.core.errors import InvalidInput
from loader.datasets.dataset import Dataset
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed

MAX_DEPTH = 8
"""Layers looked through for a dataset of ours."""
MAX_PARTS = 1000
"""Of a list or dict, looked through: longer ones are of samples."""


@dataclass(frozen=True, slots=True)
class WrappedDataset:
    """Plain datasets of ours in `outer`, which indexes them its own way."""

    outer: object
    leaves: tuple[Dataset, ...]
    """In the order in which they lie there, each once."""

    @property
    def identity(self) -> str:
        """Which data this is: all parts, in order."""
        return _identity(self.outer, MAX_DEPTH)


CacheDataset = Dataset | Mixture | Packed | WrappedDataset


def cache_dataset_in(dataset: object) -> CacheDataset | None:
    """What is ours of a dataset: itself, or what is inside; None for nothing. Raises InvalidInput for a mixture or
    packs inside another dataset: their samples are drawn anew each epoch, so no index from outside names one."""
    if isinstance(dataset, (Dataset, Mixture, Packed)):
        return dataset
    leaves: dict[Dataset, None] = {}
    for found in _cache_datasets_in(dataset, MAX_DEPTH):
        if not isinstance(found, Dataset):
            made = "mix" if isinstance(found, Mixture) else "pack"
            raise InvalidInput(
                f"a {type(found).__name__} inside a {type(dataset).__name__} has no order to share between ranks: split(), "
                f"take() or where() the datasets first, then {made}() the parts"
            )
        leaves[found] = None
    return WrappedDataset(dataset, tuple(leaves)) if leaves else None


def leaves_in(dataset: object) -> Iterator[Dataset]:
    """The plain datasets of ours, whatever is around them."""
    for found in _cache_datasets_in(dataset, MAX_DEPTH):
        yield from found.leaves


def hidden_leaves_in(dataset: object, depth: int = MAX_DEPTH) -> Iterator[Dataset]:
    """The plain datasets of ours in any attribute of what users wrote, or in a list or dict there, where `leaves_in` finds
    none."""
    for part in _attribute_values(dataset) if depth else ():
        if isinstance(part, (Dataset, Mixture, Packed)):
            yield from part.leaves
        elif isinstance(part, TorchDataset):
            yield from hidden_leaves_in(part, depth - 1)


def _attribute_values(dataset: object) -> Iterator[object]:
    for value in getattr(dataset, "__dict__", {}).values():
        several = [*value.values()] if isinstance(value, dict) else value
        yield from several[:MAX_PARTS] if isinstance(several, (list, tuple)) else (value,)


def as_view(dataset: object) -> Dataset | None:
    """The dataset as a view of ours, where it is one: ours, or torch's own Subset of it. Raises IndexError."""
    if isinstance(dataset, Dataset):
        return dataset
    if type(dataset) is Subset:
        inner = as_view(dataset.dataset)
        return inner.select(places_of(dataset.indices, len(inner), "sample")) if inner is not None else None
    return None


def key_at(dataset: object, index: int) -> str:
    """The key in the source of the sample that an index names, of a StackDataset that of its first part with keys; "" where
    what is around our dataset indexes it its own way, and of a pack, which has pieces of several."""
    if isinstance(dataset, Dataset):
        return dataset.catalog.key(int(dataset.ids_of(np.asarray([index], np.int64))[0]))
    if isinstance(dataset, Mixture):
        component, _, inner = dataset.locate(np.asarray([index], np.int64))
        return key_at(dataset.components[int(component[0])], int(inner[0]))
    if type(dataset) is ConcatDataset:
        part = bisect_right(dataset.cumulative_sizes, index)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return key_at(dataset.datasets[part], index - before)
    if type(dataset) is StackDataset:
        return next((key for part in parts_of(dataset) or () if (key := key_at(part, index))), "")
    if type(dataset) is Subset and isinstance(
        dataset.dataset, (Dataset, ConcatDataset, StackDataset, Subset)
    ):
        at = int(dataset.indices[index])
        return key_at(dataset.dataset, at + len(dataset.dataset) if at < 0 else at)
    return ""


def _cache_datasets_in(dataset: object, depth: int) -> Iterator[Dataset | Mixture | Packed]:
    if isinstance(dataset, (Dataset, Mixture, Packed)):
        yield dataset
    elif dataset is not None and depth:
        parts = parts_of(dataset)
        for part in [getattr(dataset, "dataset", None)] if parts is None else parts:
            yield from _cache_datasets_in(part, depth - 1)


def parts_of(dataset: object) -> Iterable[Any] | None:
    """What torch has put one behind the other, or side by side; None for all else."""
    if isinstance(dataset, StackDataset) and isinstance(dataset.datasets, dict):
        return dataset.datasets.values()
    return dataset.datasets if isinstance(dataset, (ConcatDataset, StackDataset)) else None


def _identity(dataset: object, depth: int) -> str:
    """Of a view its own; of parts or of chosen indices a digest; of what only holds a dataset, that dataset's."""
    view = as_view(dataset)
    if view is not None:
        return view.identity
    if dataset is None or not depth:
        return ""
    parts = parts_of(dataset)
    if parts is not None:
        identities = [f"{len(part)}:{_identity(part, depth - 1)}" for part in parts]
        how = "beside" if isinstance(dataset, StackDataset) else "behind"
        return _digest("\n".join((how, *identities)).encode())
    inner = _identity(getattr(dataset, "dataset", None), depth - 1)
    chosen = _chosen_indices(dataset)
    return inner if chosen is None else f"{inner}:{_digest(chosen.tobytes())}"


def _chosen_indices(dataset: object) -> np.ndarray[Any, Any] | None:
    """The indices that say which samples these are: of a Subset (names, say, of what is not ours), and of what a user
    wrote like it."""
    try:
        indices = np.asarray(getattr(dataset, "indices", None))
    except ValueError:  # a list of lists, say: no choice of samples
        return None
    whole = indices.ndim == 1 and (indices.dtype.kind in "iu" or not indices.size)
    if not (whole or isinstance(dataset, Subset)):
        return None
    return indices.astype(np.int64 if indices.dtype.kind in "iubf" else np.str_)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
