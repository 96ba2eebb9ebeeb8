"""Finds cachesvc datasets inside Subset, ConcatDataset, StackDataset, and users' datasets that hold one in `.dataset`.

One class for each wrapper says how it joins what its parts have; one walk asks them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
from torch.utils.data import ConcatDataset, StackDataset, Subset
from torch.utils.data import Dataset as TorchDataset

from cachesvc.core.arguments import places_of
from cachesvc.core.errors import InvalidInput
from loader.datasets.dataset import Dataset, current_rng_key
from loader.datasets.extent_layout import ExtentLayout, LayoutPart, view_layout
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.reading.reader import Ints

MAX_DEPTH = 8
"""Layers that are searched for a cachesvc dataset."""
MAX_PARTS = 1000
"""Entries of a list or dict that are searched. Longer ones hold samples."""
_OURS = Dataset, Mixture, Packed
_TORCHS = ConcatDataset, StackDataset, Subset
"""Wrappers whose indices are known. A subclass may use them in its own way."""
T = TypeVar("T")
FetchSamples = Callable[[Ints, tuple[int, int]], Iterator[Any]]
"""Takes indices and the (seed, epoch) that transforms draw from; returns the samples, made one at a time so that the memory
of one is free for the next."""


class Wrapper(Protocol):
    """A dataset around its parts. Each method joins what the parts have. `layout` returns None where extents are unknown,
    `fetcher` where the dataset fetches samples itself. Both raise IndexError."""

    @property
    def parts(self) -> list[Any]: ...

    def identity(self, parts: list[str]) -> str: ...

    def layout(self, parts: list[ExtentLayout], shuffle: bool) -> ExtentLayout | None: ...

    def fetcher(self, parts: list[FetchSamples]) -> FetchSamples | None: ...


class _View:
    """A dataset of `open_dataset`, or torch's Subset of one."""

    def __init__(self, view: Dataset) -> None:
        self._view, self.parts = view, list[Any]()

    def identity(self, parts: list[str]) -> str:
        return self._view.identity

    def layout(self, parts: list[ExtentLayout], shuffle: bool) -> ExtentLayout:
        return view_layout(self._view, shuffle)

    def fetcher(self, parts: list[FetchSamples]) -> FetchSamples | None:
        view = self._view
        if view.has_own_getitem:
            return None
        return lambda indices, rng_key: view.iter_samples(view.ids_of(indices), rng_key)


class _Behind:
    """The parts of a ConcatDataset, one behind the other."""

    def __init__(self, dataset: ConcatDataset[Any]) -> None:
        self._dataset, self.parts = dataset, dataset.datasets

    def identity(self, parts: list[str]) -> str:
        return _joined("behind", self.parts, parts)

    def layout(self, parts: list[ExtentLayout], shuffle: bool) -> ExtentLayout:
        starts = np.cumsum([0, *(part.extent_first[-1] for part in parts)]).tolist()
        pairs = [*zip(parts, starts, strict=False)]
        firsts = [part.extent_first[1:] + start for part, start in pairs]
        index_of = None
        if any(part.index_of is not None for part in parts):
            index_of = np.concatenate([_indices(part) + start for part, start in pairs])
        opened = [LayoutPart(each.opened, each.first + start) for part, start in pairs for each in part.parts]
        return ExtentLayout(np.concatenate([np.zeros(1, np.int64), *firsts]), index_of, tuple(opened))

    def fetcher(self, parts: list[FetchSamples]) -> FetchSamples:
        bounds = self._bounds()

        def fetch(indices: Ints, rng_key: tuple[int, int]) -> Iterator[Any]:
            part_of = np.searchsorted(bounds[1:], indices, side="right")
            inner = indices - bounds[part_of]
            samples_of = {
                part: parts[part](inner[part_of == part], rng_key) for part in np.unique(part_of).tolist()
            }
            return (next(samples_of[part]) for part in part_of.tolist())

        return fetch

    def places(self, index: int) -> list[tuple[Any, int]]:
        bounds = self._bounds()
        part = int(np.searchsorted(bounds[1:], index, side="right"))
        return [(self.parts[part], index - int(bounds[part]))]

    def _bounds(self) -> Ints:
        return np.asarray([0, *self._dataset.cumulative_sizes], np.int64)


class _Beside:
    """The parts of a StackDataset, side by side."""

    def __init__(self, dataset: StackDataset[Any]) -> None:
        given = dataset.datasets
        self._names = tuple(given) if isinstance(given, dict) else None
        self.parts = [*given.values()] if isinstance(given, dict) else [*given]

    def identity(self, parts: list[str]) -> str:
        return _joined("beside", self.parts, parts)

    def layout(self, parts: list[ExtentLayout], shuffle: bool) -> ExtentLayout:
        """Take the order of the part with the most extents. Other parts are read ahead if their own order is the same."""
        with_parts = [part for part in parts if part.parts]
        leading = max(with_parts or parts, key=lambda part: len(part.extent_first))
        in_order = [part for part in parts if part is leading or _same_order(part.index_of, leading.index_of)]
        return leading._replace(parts=tuple(piece for part in in_order for piece in part.parts))

    def fetcher(self, parts: list[FetchSamples]) -> FetchSamples:
        def fetch(indices: Ints, rng_key: tuple[int, int]) -> Iterator[Any]:
            samples = zip(*(part(indices, rng_key) for part in parts), strict=True)
            names = self._names
            return samples if names is None else (dict(zip(names, each, strict=True)) for each in samples)

        return fetch

    def places(self, index: int) -> list[tuple[Any, int]]:
        return [(part, index) for part in self.parts]


class _Within:
    """A Subset, or a user's dataset that holds another one. It is assumed to use the same indices if it has as many."""

    def __init__(self, dataset: Any) -> None:
        inner: Any = getattr(dataset, "dataset", None)
        self._dataset, self._inner = dataset, inner
        self.parts = [] if inner is None else [inner]

    def identity(self, parts: list[str]) -> str:
        """Return that of the inner one, with a digest of the indices that are selected. They may be names if the inner one
        is not a cachesvc dataset."""
        inner = "".join(parts)
        try:
            indices = np.asarray(getattr(self._dataset, "indices", None))
        except ValueError:  # a list of lists, for example, selects no samples
            return inner
        whole = indices.ndim == 1 and (indices.dtype.kind in "iu" or not indices.size)
        if not (whole or isinstance(self._dataset, Subset)):
            return inner
        content = indices.astype(np.int64 if indices.dtype.kind in "iubf" else np.str_).tobytes()
        return f"{inner}:{_digest(content)}"

    def layout(self, parts: list[ExtentLayout], shuffle: bool) -> ExtentLayout | None:
        if not parts or not parts[0].parts:  # perhaps another library's dataset, with indices of any kind
            return None
        return (
            _chosen(parts[0], self._dataset.indices, shuffle) if type(self._dataset) is Subset else parts[0]
        )

    def fetcher(self, parts: list[FetchSamples]) -> FetchSamples | None:
        if type(self._inner) not in _TORCHS:
            return None
        places = places_of(self._dataset.indices, len(self._inner), "sample")
        return lambda indices, rng_key: parts[0](places[indices], rng_key)

    def places(self, index: int) -> list[tuple[Any, int]]:
        if not isinstance(self._inner, (Dataset, *_TORCHS)):
            return []
        inner = int(self._dataset.indices[index])
        return [(self._inner, inner + len(self._inner) if inner < 0 else inner)]


def _wrapper_of(dataset: Any) -> _Behind | _Beside | _Within:
    """Return a dataset as a wrapper. One that holds nothing has no parts."""
    if isinstance(dataset, ConcatDataset):
        return _Behind(dataset)
    return _Beside(dataset) if isinstance(dataset, StackDataset) else _Within(dataset)


def _walk(dataset: Any, visit: Callable[[Any, Wrapper, list[T]], T], depth: int = MAX_DEPTH) -> T:
    """Call `visit` from the inside out with each dataset, with its wrapper, and with what `visit` returned for its parts.
    Raises IndexError."""
    view = dataset if isinstance(dataset, Dataset) else as_view(dataset)
    wrapper: Wrapper = _View(view) if view is not None else _wrapper_of(dataset if depth else None)
    return visit(dataset, wrapper, [_walk(part, visit, depth - 1) for part in wrapper.parts])


def as_view(dataset: object) -> Dataset | None:
    """Return the dataset as a view, if it is a dataset of `open_dataset` or torch's Subset of one; otherwise None,
    as for a subclass with its own `__getitem__`. Raises IndexError."""
    if isinstance(dataset, Dataset):
        return None if dataset.has_own_getitem else dataset
    if type(dataset) is Subset:
        inner = as_view(dataset.dataset)
        return inner.select(places_of(dataset.indices, len(inner), "sample")) if inner is not None else None
    return None


# ---- what a dataset holds


@dataclass(frozen=True, slots=True)
class WrappedDataset:
    """Plain datasets of `open_dataset` inside `outer`, which indexes them in its own way."""

    outer: object
    leaves: tuple[Dataset, ...]
    """In their order inside `outer`, without duplicates."""

    @property
    def identity(self) -> str:
        """The identity of all parts, in order: a view's own, a digest for parts that are joined."""
        return _walk(self.outer, lambda _, wrapper, parts: wrapper.identity(parts))


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
        if isinstance(part, _OURS):
            yield from part.leaves
        elif isinstance(part, TorchDataset):
            yield from hidden_leaves_in(part, depth - 1)


def _attribute_values(dataset: object) -> Iterator[object]:
    for value in getattr(dataset, "__dict__", {}).values():
        several = [*value.values()] if isinstance(value, dict) else value
        yield from several[:MAX_PARTS] if isinstance(several, (list, tuple)) else (value,)


def _cache_datasets_in(dataset: object, depth: int) -> Iterator[Dataset | Mixture | Packed]:
    if isinstance(dataset, _OURS):
        yield dataset
    elif depth:
        for part in _wrapper_of(dataset).parts:
            yield from _cache_datasets_in(part, depth - 1)


# ---- how a dataset is read


def extent_layout(dataset: Any, shuffle: bool) -> ExtentLayout:
    """Return the layout of a dataset. If nothing is known, all samples count as one extent. Raises IndexError for a
    Subset with an index out of range."""

    def visit(each: Any, wrapper: Wrapper, parts: list[ExtentLayout]) -> ExtentLayout:
        count = len(each) if each is dataset or hasattr(each, "__len__") else 0
        found = wrapper.layout(parts, shuffle)
        if found is None or (int(found.extent_first[-1]) != count and as_view(each) is None):
            return ExtentLayout(np.asarray([0, count], np.int64), None, ())
        return found

    return _walk(dataset, visit)


def sample_fetcher(dataset: Any) -> FetchSamples:
    """Return the function that fetches samples of a dataset in its present state. Views of `open_dataset` are read in one
    pass, also inside torch's wrappers, whose own code would ask for samples one by one. Any other dataset is indexed as
    torch does it. Raises IndexError for a Subset with an index out of range."""

    def visit(each: Any, wrapper: Wrapper, parts: list[FetchSamples]) -> FetchSamples:
        found = wrapper.fetcher(parts) if isinstance(each, Dataset) or type(each) in _TORCHS else None
        return found or (lambda indices, rng_key: _fetch_as_torch(each, indices.tolist(), rng_key))

    return _walk(dataset, visit)


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


def key_at(dataset: Any, index: int) -> str:
    """Return the source key of the sample at an index. For a StackDataset it is the key of the first part that has
    keys. Returns "" for a pack, which has pieces of several samples, and for datasets that use indices in their own
    way."""
    if isinstance(dataset, Dataset):
        return dataset.catalog.key(int(dataset.ids_of(np.asarray([index], np.int64))[0]))
    return next((key for part, inner in parts_at(dataset, index) if (key := key_at(part, inner))), "")


def parts_at(dataset: Any, index: int) -> list[tuple[Any, int]]:
    """Return the datasets, with an index in each, that the sample at an index is made of. None are known of datasets that
    use indices in their own way."""
    if isinstance(dataset, Mixture):
        component, _, inner = dataset.locate(np.asarray([index], np.int64))
        return [(dataset.components[int(component[0])], int(inner[0]))]
    return _wrapper_of(dataset).places(index) if type(dataset) in _TORCHS else []


def _same_order(one: Ints | None, other: Ints | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _chosen(inner_layout: ExtentLayout, indices: Any, shuffle: bool) -> ExtentLayout | None:
    """Return the layout of a Subset's samples within its inner dataset."""
    places = places_of(indices, int(inner_layout.extent_first[-1]), "sample")
    if inner_layout.index_of is not None:
        ordinal = np.empty_like(inner_layout.index_of)
        ordinal[inner_layout.index_of] = np.arange(len(ordinal))
        places = ordinal[places]
    index_of = None
    if (places[1:] < places[:-1]).any():
        if not shuffle:
            return None
        index_of = np.argsort(places, kind="stable")
        places = places[index_of]
    first, *others = (
        np.searchsorted(places, each).astype(np.int64)
        for each in (inner_layout.extent_first, *(piece.first for piece in inner_layout.parts))
    )
    parts = zip((piece.opened for piece in inner_layout.parts), others, strict=True)
    return ExtentLayout(first, index_of, tuple(LayoutPart(*each) for each in parts))


def _indices(part: ExtentLayout) -> Ints:
    return np.arange(part.extent_first[-1]) if part.index_of is None else part.index_of


def _joined(how: str, parts: list[Any], identities: list[str]) -> str:
    lines = (f"{len(part)}:{identity}" for part, identity in zip(parts, identities, strict=True))
    return _digest("\n".join((how, *lines)).encode())


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
