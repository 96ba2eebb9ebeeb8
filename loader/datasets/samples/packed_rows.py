"""Rows of MDS and litData, each of which states where its fields lie: batches of texts and numbers take one pass over each
column, whatever the number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import default_collate

from cachesvc.catalog.layout import Indirect
from loader.datasets.decoding.decode import number_type, text_kind
from loader.datasets.generators import RngKey
from loader.datasets.plain_values import Empty, number_tensor, wide_type
from loader.datasets.samples.fields import FieldValues
from loader.datasets.samples.sample_form import ColumnBatches, Row, SampleForm
from loader.reading.reader import ExtentReader, Ints


class PackedRowSamples:
    """Samples of fields that lie together in a row."""

    places = None

    def __init__(self, form: SampleForm, layout: Indirect) -> None:
        """Raises InvalidInput for fields that cannot be decoded."""
        self._form, self._values, self._catalog = form, FieldValues(form), form.catalog
        self.sample_kind = form.kind
        encodings = [form.catalog.fields[column].encoding for column in form.columns]
        plain = form.is_plain and form.spec.decode == "auto" and not layout.packed_rows
        self._has_columns = plain and all(number_type(each) or text_kind(each) for each in encodings)
        self._sizes = np.array(layout.sizes, np.int64)
        self._stated = np.flatnonzero(self._sizes < 0)

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """See `SampleReader`."""
        return self._values.samples(self._rows(reader, samples), samples, rng_key)

    def gather(self, collate: Callable[..., Any]) -> ColumnBatches | None:
        """See `SampleReader`."""
        if not self._has_columns or collate is not default_collate:
            return None
        return ColumnBatches(self._form, self._columns, self.iter_samples)

    def _rows(self, reader: ExtentReader, samples: Ints) -> list[Row]:
        places, lengths = self._catalog.locate(samples)
        pairs = reader.read(places[:, 0], lengths[:, 0])
        offsets = np.frombuffer(b"".join(pair or b"" for pair in pairs), "<u4").reshape(-1, 2)
        addresses, lengths = self._catalog.settle(samples, offsets)
        rows = reader.read(addresses[:, 0], lengths[:, 0])
        split = (self._catalog.split(row or b"") for row in rows)
        return [[row[column] for column in self._form.columns] for row in split]

    def _columns(self, reader: ExtentReader, samples: Ints, empty: Empty | None) -> list[Any] | None:
        """Return each column of samples as torch's default collation makes it: a tensor, or a list of texts.

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
        found = [
            self._column(reader, at, begins[:, at], sizes[:, at], first, empty) for at in self._form.columns
        ]
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
