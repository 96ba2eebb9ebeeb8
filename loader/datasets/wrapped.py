"""Finds cachesvc datasets inside Subset, ConcatDataset, StackDataset, and users' datasets that hold one in
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
"""Layers that are searched for a cachesvc dataset."""
MAX_PARTS = 1000
"""Entries of a list or dict that are searched. Longer ones hold samples."""


@dataclass(frozen=True, slots=True)
class WrappedDataset:
    """Plain datasets of `open_dataset` inside `outer`, which indexes them in its own way."""

    outer: object
    leaves: tuple[Dataset, ...]
    """In their order inside `outer`, without duplicates."""

    @property
    def identity(self) -> str:
        """The identity of all parts, in order."""
        return _identity(self.outer, MAX_DEPTH)


CacheDataset = Dataset | Mixture | Packed | WrappedDataset


def cache_dataset_in(dataset: object) -> CacheDataset | None:
    """Return the cachesvc dataset that `dataset` is or holds; None if there is none.

    Raises InvalidInput for a mixture or packs inside another dataset: their samples are drawn anew in each epoch,
    so an outer index names none of them.
    """
    if isinstance(dataset, (Mixture, Packed)):
        return dataset
    if isinstance(dataset, Dataset):
        return WrappedDataset(dataset, (dataset,)) if dataset.has_own_getitem else dataset
    leaves: dict[Dataset, None] = {}
    for found in _cache_datasets_in(dataset, MAX_DEPTH):
        if not isinstance(found, Dataset):
            made = "mix" if isinstance(found, Mixture) else "pack"
            raise InvalidInput(
                f"a {type(found).__name__} inside a {type(dataset).__name__} cannot be divided among ranks: apply "
                f"split(), take() or where() to the datasets first, then {made}() to the parts"
            )
        leaves[found] = None
    return WrappedDataset(dataset, tuple(leaves)) if leaves else None


def leaves_in(dataset: object) -> Iterator[Dataset]:
    """Iterate over the plain datasets of `open_dataset` in a dataset."""
    for found in _cache_datasets_in(dataset, MAX_DEPTH):
        yield from found.leaves


def hidden_leaves_in(dataset: object, depth: int = MAX_DEPTH) -> Iterator[Dataset]:
    """Iterate over the plain datasets in any attribute of a user's dataset, or in a list or dict there. They are
    not ordered by a loader."""
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
    """Return the dataset as a view, if it is a dataset of `open_dataset` or torch's Subset of one; otherwise None,
    as for a subclass with its own `__getitem__`. Raises IndexError."""
    if isinstance(dataset, Dataset):
        return None if dataset.has_own_getitem else dataset
    if type(dataset) is Subset:
        inner = as_view(dataset.dataset)
        return inner.select(places_of(dataset.indices, len(inner), "sample")) if inner is not None else None
    return None


def key_at(dataset: object, index: int) -> str:
    """Return the source key of the sample at an index. For a StackDataset it is the key of the first part that has
    keys. Returns "" for a pack, which has pieces of several samples, and for datasets that use indices in their own
    way."""
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
    """Return the parts of a ConcatDataset or StackDataset; None for anything else."""
    if isinstance(dataset, StackDataset) and isinstance(dataset.datasets, dict):
        return dataset.datasets.values()
    return dataset.datasets if isinstance(dataset, (ConcatDataset, StackDataset)) else None


def _identity(dataset: object, depth: int) -> str:
    """Return a view's identity, a digest for concatenated or stacked parts and for chosen indices, or the identity
    of the dataset that is held."""
    view = dataset if isinstance(dataset, Dataset) else as_view(dataset)
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
    """Return the indices that a Subset, or a user's dataset like it, selects. They may be names if the inner
    dataset is not a cachesvc one."""
    try:
        indices = np.asarray(getattr(dataset, "indices", None))
    except ValueError:  # a list of lists, for example, selects no samples
        return None
    whole = indices.ndim == 1 and (indices.dtype.kind in "iu" or not indices.size)
    if not (whole or isinstance(dataset, Subset)):
        return None
    return indices.astype(np.int64 if indices.dtype.kind in "iubf" else np.str_)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
