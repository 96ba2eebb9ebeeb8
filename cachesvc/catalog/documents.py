"""Finds where a dataset's documents lie and how many tokens each has, without reading them. Packing needs this."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.layout import Columns, Fixed, Indirect, Rows
from cachesvc.catalog.parsing.token_indices import ENDINGS
from cachesvc.core.errors import InvalidInput
from cachesvc.core.order.pack_order import Documents
from cachesvc.core.order.part_layout import subset_first


def documents_of(
    catalog: Catalog, ids: Ints | None, fields: Sequence[str], wanted_dtype: np.dtype[Any] | None
) -> Documents:
    """Return the documents of a catalog's samples `ids` (None for all): Megatron's documents, or records of integers, or
    one of `fields` of each sample as raw `wanted_dtype`. Raises InvalidInput when lengths are unknown without reading, or
    samples are not integers."""
    rows_of_text = isinstance(catalog.layout, Rows) and bool(catalog.layout.syntax)
    if rows_of_text or isinstance(catalog.layout, (Indirect, Columns)):
        raise InvalidInput(
            f"{catalog.uri}: {catalog.format} rows are not tokens; give pack(..., tokenize=) a function that "
            "returns the tokens of a row, or pack token files"
        )
    if not isinstance(catalog.layout, Fixed):
        return _of_fields(catalog, ids, fields, wanted_dtype)
    stored_dtype = np.dtype(catalog.layout.dtype)
    if (
        stored_dtype.kind not in "iu"
        or len(catalog.layout.shape) != 1
        or wanted_dtype not in (None, stored_dtype)
    ):
        shape = catalog.layout.shape
        raise InvalidInput(
            f"{catalog.uri} holds {stored_dtype} of shape {shape}, not documents of {wanted_dtype or 'integers'}"
        )
    if catalog.documents is not None:
        return _of_megatron(catalog, ids, catalog.documents, stored_dtype)
    return _of_records(catalog, ids, catalog.layout, stored_dtype)


def documents_of_rows(dtype: np.dtype[Any], first: Ints, counts: Ints) -> Documents:
    """Return rows that are tokenised as they are read, by the first row of each extent and the tokens of each row."""
    return _documents_at(dtype, first, np.arange(len(counts)), counts)


def documents_ending_at(catalog: Catalog, ids: Ints | None, places: Ints) -> Documents:
    """Return the documents of token files that end at these addresses, and at the ends of files. Raises InvalidInput for a
    subset of the dataset."""
    assert isinstance(catalog.layout, Fixed)
    dtype = np.dtype(catalog.layout.dtype)
    token, address, _ = _files(catalog, dtype.itemsize)
    file = np.searchsorted(address, places, "left") - 1
    return _of_megatron(catalog, ids, token[file] + (places - address[file]) // dtype.itemsize, dtype)


def rows_of(catalog: Catalog, ids: Ints | None) -> tuple[Ints, Ints]:
    """Return samples in the order of their addresses, and the first of them in each extent."""
    ids = _ascending(ids)
    return np.arange(catalog.samples) if ids is None else ids, _first(catalog, ids)


def _of_records(catalog: Catalog, ids: Ints | None, layout: Fixed, dtype: np.dtype[Any]) -> Documents:
    if layout.stride_bytes < layout.record_bytes:
        raise InvalidInput(f"{catalog.uri}: overlapping sequences would be packed twice; open with overlap=0")
    ids, length = _ascending(ids), layout.record_bytes // dtype.itemsize
    first = _first(catalog, ids)

    def place_of(documents: Ints) -> Ints:
        return layout.slots(documents if ids is None else ids[documents]) * layout.stride_bytes

    return Documents(
        dtype, first, np.diff(first) * length, place_of, lambda documents: np.full(len(documents), length)
    )


def _of_fields(
    catalog: Catalog, ids: Ints | None, fields: Sequence[str], dtype: np.dtype[Any] | None
) -> Documents:
    names = [field.name for field in catalog.fields]
    wanted = [name for name in fields or names if name in names]
    if len(wanted) != 1 or dtype is None or dtype.kind not in "iu":
        raise InvalidInput(
            f"{catalog.uri} has fields {', '.join(names)}: to pack one of them as raw integers, open it with "
            "fields=(NAME,) and give pack(..., dtype='uint16'), for example"
        )
    column, width, ids = names.index(wanted[0]), dtype.itemsize, _ascending(ids)
    addresses, lengths = (
        array[:, column] for array in catalog.locate(np.arange(catalog.samples) if ids is None else ids)
    )
    misfits = np.flatnonzero((lengths < 0) | (lengths % width != 0))
    if len(misfits):
        sample = int(misfits[0] if ids is None else ids[misfits[0]])
        raise InvalidInput(
            f"{catalog.key(sample)} in {catalog.uri} holds {lengths[misfits[0]]} bytes, not a whole number of {dtype}"
        )
    return _documents_at(dtype, _first(catalog, ids), addresses, lengths // width)


def _of_megatron(catalog: Catalog, ids: Ints | None, bounds: Ints, dtype: np.dtype[Any]) -> Documents:
    if ids is not None:
        raise InvalidInput(
            f"{catalog.uri}: a subset of sequences is not a subset of documents; pack the whole dataset"
        )
    token, address, size = _files(catalog, dtype.itemsize)
    edges = np.union1d(bounds, np.concatenate((token, token + size)))
    begin, length = edges[:-1], np.diff(edges)
    file = np.searchsorted(token, begin, "right") - 1
    # parts of files too short to be in the catalog are left out
    in_catalog = (file >= 0) & (begin < (token + size)[file])
    begin, length, file = begin[in_catalog], length[in_catalog], file[in_catalog]
    addresses = address[file] + (begin - token[file]) * dtype.itemsize
    first = np.searchsorted(addresses, catalog.extent_starts)
    return replace(_documents_at(dtype, np.append(first, len(addresses)), addresses, length), of_files=True)


def _files(catalog: Catalog, width: int) -> tuple[Ints, Ints, Ints]:
    """Return, for each file with extents, its first token in the concatenation of all files, its address, and its
    number of tokens."""
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
    rows, token = [], 0
    for at in range(catalog.objects):
        stored = catalog.object(at)
        tokens = size_bytes.get(at, 0 if stored.uri.lower().endswith(ENDINGS) else stored.size_bytes) // width
        if at in address:
            rows.append((token, address[at], tokens))
        token += tokens
    columns = np.asarray(rows, np.int64).reshape(-1, 3)
    return columns[:, 0], columns[:, 1], columns[:, 2]


def _documents_at(dtype: np.dtype[Any], first: Ints, addresses: Ints, lengths: Ints) -> Documents:
    totals = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    return Documents(
        dtype,
        first.astype(np.int64),
        totals[first[1:]] - totals[first[:-1]],
        lambda documents: addresses[documents],
        lambda documents: lengths[documents],
    )


def _ascending(ids: Ints | None) -> Ints | None:
    return None if ids is None else np.sort(ids)


def _first(catalog: Catalog, ids: Ints | None) -> Ints:
    return catalog.extent_first if ids is None else subset_first(catalog.extent_first, ids)
