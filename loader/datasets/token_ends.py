"""Finds where documents end in token files without an index: after each token of one value, which a user names."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from cachesvc.catalog.layout import Fixed
from cachesvc.core.arguments import whole_number
from cachesvc.core.errors import InvalidInput
from cachesvc.saved_runs.kept_counts import KeptCounts, key_of_ends
from loader.datasets.dataset import Dataset
from loader.datasets.dtypes import dtype_named
from loader.job.topology import in_turns
from loader.reading.reader import Ints

_READ_BYTES = 4 << 20
"""Bytes that are searched at once."""


def places_after(dataset: Dataset, eos: Any, stated: str | None, folder: str | None) -> Ints:
    """Return the addresses after each token `eos` of the dataset's files, ascending, int64. All tokens are read, an extent
    at a time. `stated`: the type that tokens should have. The places are kept in `folder`, which processes may share.

    Raises InvalidInput for data that are no token files, that have an index of documents, or that cannot hold the token;
    OutOfSpace where the folder cannot be written, and the errors of reading.
    """
    catalog, layout = dataset.catalog, dataset.catalog.layout
    if catalog.format != "tokens" or not isinstance(layout, Fixed):
        raise InvalidInput(
            f"eos={eos!r} finds documents in token files, and {catalog.uri} holds {catalog.format}"
        )
    if catalog.documents is not None:
        raise InvalidInput(
            f"eos={eos!r}: the documents of {catalog.uri} have an index, which says where they end"
        )
    dtype = np.dtype(layout.dtype)
    if stated is not None and dtype_named(stated) != dtype:
        raise InvalidInput(f"{catalog.uri} holds {dtype}, not {stated}")
    room = np.iinfo(dtype)
    token, kept = whole_number("eos", eos, room.min, room.max), KeptCounts(folder)
    found = {
        extent: kept.get(
            key_of_ends(dataset.version, token, dtype, extent),
            partial(_ends, dataset, extent, dtype, token),
        )
        for extent in in_turns(np.arange(len(catalog.extent_sizes)))
    }
    return np.concatenate([np.empty(0, np.int64), *(found[extent] for extent in sorted(found))])


def _ends(dataset: Dataset, extent: int, dtype: np.dtype[Any], token: int) -> Ints:
    found, reader = [np.empty(0, np.int64)], dataset.opened.reader()
    start, size = (
        int(column[extent]) for column in (dataset.catalog.extent_starts, dataset.catalog.extent_sizes)
    )
    for low in range(0, size // dtype.itemsize * dtype.itemsize, _READ_BYTES):
        length = min(_READ_BYTES, size - low) // dtype.itemsize * dtype.itemsize
        (raw,) = reader.read(np.asarray([start + low]), np.asarray([length]))
        places = np.flatnonzero(np.frombuffer(raw or b"", dtype) == token)
        found.append(start + low + (places + 1) * dtype.itemsize)
    return np.concatenate(found)
