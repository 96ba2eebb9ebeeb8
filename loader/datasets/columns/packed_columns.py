"""Reads rows of MDS and litData a batch at a time: one pass over each column, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Indirect
from loader.datasets.columns.plain_values import Empty, number_tensor, wide_type
from loader.datasets.decoding.decode import number_type, text_kind
from loader.reading.reader import ExtentReader, Ints


class PackedColumns:
    """Makes batches of the chosen columns of a catalog, all of which are texts, bytes or numbers."""

    def __init__(self, catalog: Catalog, columns: Sequence[int]) -> None:
        """`columns`: the indices of the fields that are read."""
        assert isinstance(catalog.layout, Indirect), "other layouts have no rows to split"
        self._catalog, self._layout, self._columns = catalog, catalog.layout, columns
        self._sizes = np.array(catalog.layout.sizes, np.int64)
        self._stated = np.flatnonzero(self._sizes < 0)

    @staticmethod
    def reads(catalog: Catalog, columns: Sequence[int]) -> bool:
        """Tell whether these columns are plain ones of rows that are not compressed one by one."""
        if (
            not isinstance(catalog.layout, Indirect)
            or catalog.layout.packed_rows
            or min(columns, default=-1) < 0
        ):
            return False
        encodings = [catalog.fields[column].encoding for column in columns]
        return all(number_type(each) or text_kind(each) for each in encodings)

    def batch(self, reader: ExtentReader, samples: Ints, empty: Empty | None) -> list[Any] | None:
        """Return each chosen column of samples as torch's default collation makes it: a tensor, or a list of texts.

        Return None where a row does not decode: read alone, it raises an error that names it. Raises CorruptData for
        offsets outside a shard, and the errors of `ExtentReader.read`.
        """
        places, lengths = self._catalog.locate(samples)
        first, _ = reader.spans(places[:, 0], lengths[:, 0])
        pairs = reader.items(places[:, 0], 8, first).view("<u4").reshape(-1, 2)
        addresses, lengths = (found[:, 0] for found in self._catalog.settle(samples, pairs))
        head = 4 * len(self._stated)
        if (lengths < head).any():
            return None
        sizes = np.tile(self._sizes, (len(samples), 1))
        if head:
            sizes[:, self._stated] = (
                reader.items(addresses, head, first).view("<u4").reshape(len(samples), -1)
            )
        ends = (addresses + head)[:, None] + np.cumsum(sizes, axis=1)
        if (ends[:, -1] != addresses + lengths).any():
            return None
        begins = ends - sizes
        found = [self._column(reader, at, begins[:, at], sizes[:, at], first, empty) for at in self._columns]
        return None if any(column is None for column in found) else found

    def _column(
        self, reader: ExtentReader, at: int, begins: Ints, sizes: Ints, first: Ints, empty: Empty | None
    ) -> Any:
        encoding = self._catalog.fields[at].encoding
        stored = number_type(encoding)
        if not stored:
            found = reader.read(begins, sizes)
            try:
                return [(raw or b"").decode() for raw in found] if text_kind(encoding) is str else found
            except UnicodeDecodeError:
                return None
        dtype = np.dtype(stored)
        if (sizes != dtype.itemsize).any():
            return None
        data = reader.items(begins, dtype.itemsize, first).view(dtype)
        too_large = dtype.kind == "u" and int(data.max(initial=0)) > np.iinfo(np.int64).max
        return None if too_large else number_tensor(data, empty, wide_type(dtype))
