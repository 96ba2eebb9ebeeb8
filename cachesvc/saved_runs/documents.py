"""Finds the documents of packs that a saved state names, without reading data."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.documents import documents_ending_at, documents_of, documents_of_rows, rows_of
from cachesvc.catalog.layout import Fixed
from cachesvc.core.errors import NotFound, StateMismatch
from cachesvc.core.order.pack_order import Documents
from cachesvc.saved_runs.data import PackSource, identity_of
from cachesvc.saved_runs.kept_counts import KeptCounts, key_of_ends, key_of_rows

TOKENS_OF_ROWS = "int64"
"""The type of tokens that `tokenize` returns, where none is given."""


def documents_in_state(
    source: PackSource, catalog: Catalog, ids: Ints | None, folder: str | None
) -> tuple[Documents, bytes | None, Ints | None]:
    """Return the documents of packs; what reading the data gave, for their identity, and None where it was not read; and
    the catalog's sample of each row, where rows are tokenised. `folder`: that of `pack(counts=)`. Raises NotFound where
    the folder does not have what is needed, and as `documents_of`."""
    if not source.counted:
        dtype = np.dtype(source.dtype) if source.dtype else None
        return documents_of(catalog, ids, source.fields, dtype), None, None
    kept = KeptCounts(folder)
    if source.eos is not None:
        if not isinstance(catalog.layout, Fixed):
            raise StateMismatch(
                f"the state has packs of token files, and {catalog.uri} holds {catalog.format}"
            )
        dtype = np.dtype(catalog.layout.dtype)
        keys = (
            key_of_ends(source.of.version, source.eos, dtype, each)
            for each in range(len(catalog.extent_sizes))
        )
        ends = np.concatenate([np.empty(0, np.int64), *(kept.get(key, _missing(folder)) for key in keys)])
        return documents_ending_at(catalog, ids, ends), ends.tobytes(), None
    samples, first = rows_of(catalog, ids)
    identity, fields = identity_of(source.of.version, ids), source.fields or None
    bounds = [
        (low, high) for low, high in zip(first[:-1].tolist(), first[1:].tolist(), strict=True) if low < high
    ]
    found = (kept.get(key_of_rows(identity, fields, *each), _missing(folder)) for each in bounds)
    counts = np.concatenate([np.empty(0, np.int64), *found])
    if counts.size != samples.size:
        raise StateMismatch(f"{folder} counts {counts.size:,} rows, and the data has {samples.size:,}")
    return (
        documents_of_rows(np.dtype(source.dtype or TOKENS_OF_ROWS), first, counts),
        counts.tobytes(),
        samples,
    )


def _missing(folder: str | None) -> Callable[[], Ints]:
    def missing() -> Ints:
        kept = (
            "give the folder of pack(counts=) as --counts"
            if folder is None
            else f"{folder} does not have them"
        )
        raise NotFound(
            f"the documents of these packs were found by reading the data (eos= or tokenize=): {kept}. pack() with "
            "counts=DIR writes it; or load the state into the run's own loader, and call batches.samples_of(step)"
        )

    return missing
