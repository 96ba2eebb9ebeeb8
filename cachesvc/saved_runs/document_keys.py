"""Names documents, and finds them by their names. A document that is a sample has its key; documents of token files are
counted in each file: `tokens.bin#17`."""

from __future__ import annotations

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.sample_places import samples_with_key
from cachesvc.core.order.pack_order import Documents


class DocumentKeys:
    """The keys of a dataset's documents, by their indices. `ids`: the catalog's samples in the sequence of a part's
    indices; None for all."""

    def __init__(self, catalog: Catalog, documents: Documents, ids: Ints | None) -> None:
        self._catalog, self._documents, self._ids = catalog, documents, ids

    def key(self, index: int) -> str:
        """Return the key of a document."""
        if not self._documents.of_files:
            return self._catalog.key(index if self._ids is None else int(self._ids[index]))
        first, objects = self._documents.extent_first, self._catalog.extent_objects
        number = int(objects[np.searchsorted(first, index, "right") - 1])
        return f"{self._catalog.shard(number)}#{index - int(first[np.flatnonzero(objects == number)[0]])}"

    def with_key(self, key: str) -> Ints:
        """Return the indices of the documents of a key, ascending; several where names repeat."""
        if not self._documents.of_files:
            samples = np.array(samples_with_key(self._catalog, key), np.int64)
            return samples if self._ids is None else np.flatnonzero(np.isin(self._ids, samples))
        shard, _, ordinal = key.rpartition("#")
        if not (ordinal.isascii() and ordinal.isdigit()):
            return np.empty(0, np.int64)
        first, objects, found = self._documents.extent_first, self._catalog.extent_objects, []
        for number in np.unique(objects).tolist():
            extents = np.flatnonzero(objects == number)
            index = int(first[extents[0]]) + int(ordinal)
            if index < first[extents[-1] + 1] and self._catalog.shard(number) == shard:
                found.append(index)
        return np.array(found, np.int64)
