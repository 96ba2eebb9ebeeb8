"""Where a dataset's documents lie and how many tokens each has, without reading any: what packing needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Fixed, Indirect, InlineTable
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.epoch_order import subset_first
from loader.datasets.dataset import Dataset
from loader.reading.reader import Ints


@dataclass(frozen=True, slots=True)
class Documents:
    """One-dimensional integer arrays, in the order of their addresses. `extent_first[i]` is the first document of
    extent i, `extent_tokens[i]` what those of extent i hold together."""

    dtype: np.dtype[Any]
    extent_first: Ints
    extent_tokens: Ints
    address_of: Callable[[Ints], Ints]
    length_of: Callable[[Ints], Ints]

    @property
    def tokens(self) -> int:
        """Of all documents."""
        return int(self.extent_tokens.sum())

    def arranged(self, arrange: Ints) -> Documents:
        """The same in another sequence, as one extent."""
        bounds, tokens = np.asarray([0, len(arrange)], np.int64), np.asarray([self.tokens], np.int64)
        return Documents(
            self.dtype,
            bounds,
            tokens,
            lambda documents: self.address_of(arrange[documents]),
            lambda documents: self.length_of(arrange[documents]),
        )


def documents_of(dataset: Dataset, dtype: str | None) -> Documents:
    """Megatron's documents; else records of integers; else the one chosen field of a sample as raw `dtype`. Raises
    InvalidInput where lengths are not known without reading, or samples are no integers."""
    catalog, asked = dataset.catalog, None if dtype is None else _type(dtype)
    if isinstance(catalog.layout, (Indirect, InlineTable)):
        raise InvalidInput(
            f"{catalog.uri}: lengths of {catalog.format} rows are not in the catalog; pack token files or raw files"
        )
    if not isinstance(catalog.layout, Fixed):
        return _of_rows(dataset, asked)
    found = np.dtype(catalog.layout.dtype)
    if found.kind not in "iu" or len(catalog.layout.shape) != 1 or asked not in (None, found):
        shape = catalog.layout.shape
        raise InvalidInput(
            f"{catalog.uri} holds {found} of shape {shape}, not documents of {asked or 'integers'}"
        )
    if catalog.documents is not None:
        return _of_megatron(dataset, catalog.documents, found)
    return _of_records(dataset, catalog.layout, found)


def _of_records(dataset: Dataset, layout: Fixed, dtype: np.dtype[Any]) -> Documents:
    if layout.stride_bytes < layout.record_bytes:
        raise InvalidInput(
            f"{dataset.catalog.uri}: overlapping sequences would be packed twice; open with overlap=0"
        )
    ids, length = _ascending(dataset), layout.record_bytes // dtype.itemsize
    first = _first(dataset.catalog, ids)

    def address_of(documents: Ints) -> Ints:
        return layout.slots(documents if ids is None else ids[documents]) * layout.stride_bytes

    return Documents(
        dtype, first, np.diff(first) * length, address_of, lambda documents: np.full(len(documents), length)
    )


def _type(dtype: str) -> np.dtype[Any]:
    try:
        return np.dtype(dtype)
    except (TypeError, ValueError):
        raise InvalidInput(f"dtype={dtype!r} is no type of numpy: give 'uint16', say") from None


def _of_rows(dataset: Dataset, dtype: np.dtype[Any] | None) -> Documents:
    catalog = dataset.catalog
    names = [field.name for field in catalog.fields]
    wanted = [name for name in dataset.form.fields or names if name in names]
    if len(wanted) != 1 or dtype is None or dtype.kind not in "iu":
        raise InvalidInput(
            f"{catalog.uri} has fields {', '.join(names)}: to pack one of them as raw integers, open it with "
            "fields=(NAME,) and give pack(..., dtype='uint16'), say"
        )
    column, width, ids = names.index(wanted[0]), dtype.itemsize, _ascending(dataset)
    addresses, lengths = (
        array[:, column] for array in catalog.locate(np.arange(catalog.samples) if ids is None else ids)
    )
    odd = np.flatnonzero((lengths < 0) | (lengths % width != 0))
    if len(odd):
        sample = int(odd[0] if ids is None else ids[odd[0]])
        raise InvalidInput(
            f"{catalog.key(sample)} in {catalog.uri} holds {lengths[odd[0]]} bytes, no whole {dtype}"
        )
    return _laid_out(dtype, _first(catalog, ids), addresses, lengths // width)


def _of_megatron(dataset: Dataset, bounds: Ints, dtype: np.dtype[Any]) -> Documents:
    catalog = dataset.catalog
    if dataset.ids is not None:
        raise InvalidInput(
            f"{catalog.uri}: a subset of sequences is no subset of documents; pack the whole dataset"
        )
    token, address, size = _files(catalog, dtype.itemsize)
    edges = np.union1d(bounds, np.concatenate((token, token + size)))
    begin, length = edges[:-1], np.diff(edges)
    file = np.searchsorted(token, begin, "right") - 1
    held = (file >= 0) & (begin < (token + size)[file])  # not in a file too short to be in the catalog
    begin, length, file = begin[held], length[held], file[held]
    addresses = address[file] + (begin - token[file]) * dtype.itemsize
    first = np.searchsorted(addresses, catalog.extent_starts)
    return _laid_out(dtype, np.append(first, len(addresses)), addresses, length)


def _files(catalog: Catalog, width: int) -> tuple[Ints, Ints, Ints]:
    """Of each file with extents: its first token in the concatenation of all files, its address, its tokens."""
    size_bytes: dict[int, int] = {}
    address: dict[int, int] = {}
    pieces = [catalog.extent(index).pieces[0].object.uri for index in range(len(catalog.extent_sizes))]
    number = {catalog.object(index).uri: index for index in range(catalog.objects)}
    for uri, start, size in zip(
        pieces, catalog.extent_starts.tolist(), catalog.extent_sizes.tolist(), strict=True
    ):
        at = number[uri]
        address.setdefault(at, start)
        size_bytes[at] = size_bytes.get(at, 0) + size
    found, token = [], 0
    for at in range(catalog.objects):
        stored = catalog.object(at)
        tokens = size_bytes.get(at, 0 if stored.uri.endswith(".idx") else stored.size_bytes) // width
        if at in address:
            found.append((token, address[at], tokens))
        token += tokens
    columns = np.asarray(found, np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _laid_out(dtype: np.dtype[Any], first: Ints, addresses: Ints, lengths: Ints) -> Documents:
    totals = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return Documents(
        dtype,
        first.astype(np.int64),
        totals[first[1:]] - totals[first[:-1]],
        lambda documents: addresses[documents],
        lambda documents: lengths[documents],
    )


def _ascending(dataset: Dataset) -> Ints | None:
    return None if dataset.ids is None else np.sort(dataset.ids)


def _first(catalog: Catalog, ids: Ints | None) -> Ints:
    return catalog.extent_first if ids is None else subset_first(catalog.extent_first, ids)
