"""Rows of columns, as Arrow lays them out: samples have Python's values, and batches are made a column at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from cachesvc.catalog.layout import Columns
from cachesvc.core.errors import CorruptData, InvalidInput
from cachesvc.sources.columnar.column import Column, firsts
from loader.datasets.decoding.decode import MEND
from loader.datasets.decoding.images import Converter, ImageMode, image_decoder
from loader.datasets.generators import RngKey
from loader.datasets.plain_values import Empty, number_tensor, wide_type
from loader.datasets.samples.column_reader import ColumnFacts, ColumnReader, Values
from loader.datasets.samples.sample_form import ColumnBatches, SampleForm
from loader.datasets.samples.to_python import python_values, stored_values
from loader.reading.reader import ExtentReader, Ints

Found = tuple[Column, Values]
"""The values of one column for a run of samples of one schema."""
_UNREADABLE = (ValueError, OverflowError, TypeError, LookupError)
"""Errors of values that Python cannot hold; UnicodeDecodeError is one of them."""


class ColumnSamples:
    """Samples of columns: Python's values by `decode="auto"`, images decoded; else the bytes that are stored."""

    places = None

    def __init__(self, form: SampleForm, layout: Columns) -> None:
        """Raises InvalidInput for images where Pillow is not installed."""
        self._form, self._catalog, self._layout, self._names = form, form.catalog, layout, form.stored
        self.sample_kind = form.kind
        self._facts = ColumnFacts(form.catalog, layout)
        self._decodes = form.spec.decode == "auto"
        self._places = [self._places_of(schema) for schema in layout.schemas]
        columns = [column for column, _ in self._places[0]] if self._places else []
        images = sum(any(map(_is_image, each.nodes())) for each in layout.schemas[0]) if columns else 0
        self._images = [
            _image_finder(column, form.spec.image_mode, name, images > 1) if self._decodes else None
            for column, name in zip(columns, self._names, strict=False)
        ]
        self._has_images = any(each is not None for each in self._images)

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """See `SampleReader`. Images are decoded on demand."""
        rows: Iterable[tuple[Any, ...]] = self._rows(reader, samples)
        if self._has_images:
            rows = self._form.decoded(rows, samples, self._images)
        return self._form.samples(rows, samples, rng_key)

    def gather(self, collate: Callable[..., Any]) -> ColumnBatches | None:
        """See `SampleReader`."""
        plain = self._form.is_plain and self._decodes and not self._has_images
        if not plain or collate is not default_collate:
            return None
        return ColumnBatches(self._form, self._columns, self.iter_samples)

    def _columns(self, reader: ExtentReader, samples: Ints, empty: Empty | None) -> list[Any] | None:
        """Return the batch of each column; None where samples are of several schemas. Raises InvalidInput, and
        CorruptData that names a sample."""
        found = self._find(reader, samples)
        if not found:
            return None
        try:
            return [self._column(each, samples, empty) for each in found]
        except ValueError as error:
            if not isinstance(error, InvalidInput):
                self._rows(reader, samples)  # raises an error that names the sample
            raise

    def _column(self, found: Found, samples: Ints, empty: Empty | None) -> Any:
        """Return the batch of one column: a tensor of numbers, of lists or tensors of one shape; a list of texts; other
        values collated. Raises InvalidInput for nulls."""
        column, values = found
        if values.valid is not None:
            raise InvalidInput(
                f"only some samples of a batch have {column.name}: choose fields= that all have, fill absent values in a "
                "transform, or give a collate_fn"
            )
        if column.kind in ("fixed", "bool") and not column.means:
            return _tensor(column.name, values.data, wide_type(values.data.dtype), empty)
        if column.kind in ("list", "fixed list") and not column.means:
            whole = _even_lists(column.children[0].means, values)
            if whole is not None:
                return _tensor(column.name, whole, whole.dtype, empty)
        plain = self._values(found)
        is_text = plain and type(plain[0]) in (str, bytes)
        return plain if is_text else self._form.collated(plain, samples, empty)

    def _places_of(self, schema: Sequence[Column]) -> list[tuple[Column, int]]:
        """Return the chosen columns of a schema, and the number of the first buffer of each."""
        places = {column.name: (column, first) for column, first in zip(schema, firsts(schema), strict=False)}
        return [places[name] for name in self._names]

    def _find(self, reader: ExtentReader, samples: Ints) -> list[Found] | None:
        """Return the chosen columns of samples; None if these are of several schemas."""
        chunks, rows = self._layout.rows(samples)
        kinds = self._layout.chunk_schema[chunks]
        if len(samples) and (kinds != kinds[0]).any():
            return None
        columns = ColumnReader(self._catalog, self._layout, self._facts, reader)
        places = self._places[int(kinds[0]) if len(kinds) else 0]
        return [(column, columns.read(column, first, chunks, rows)) for column, first in places]

    def _rows(self, reader: ExtentReader, samples: Ints) -> list[tuple[Any, ...]]:
        """Return the values of each sample in the order of the chosen fields. Images are not decoded yet."""
        found = self._find(reader, samples)
        if found is None:
            out: list[tuple[Any, ...]] = [()] * len(samples)
            kinds = self._layout.chunk_schema[self._layout.rows(samples)[0]]
            for kind in np.unique(kinds).tolist():
                mine = np.flatnonzero(kinds == kind)
                for at, row in zip(mine.tolist(), self._rows(reader, samples[mine]), strict=True):
                    out[at] = row
            return out
        if not found:
            return [()] * len(samples)
        try:
            return list(zip(*map(self._values, found), strict=True))
        except _UNREADABLE as error:
            if len(samples) > 1:
                return [row for at in range(len(samples)) for row in self._rows(reader, samples[at : at + 1])]
            raise CorruptData(
                f"{self._form.name_of(int(samples[0]))} does not decode: {error}; {MEND}"
            ) from error

    def _values(self, found: Found) -> list[Any]:
        """Return a column as Python's values. Raises what `python_values` raises."""
        if not self._decodes:
            return stored_values(*found)
        return python_values(*found, arrays=True)


def _even_lists(means: str, values: Values) -> np.ndarray[Any, Any] | None:
    """Return lists of numbers as rows of one array; None if their lengths differ, or some of the items are null."""
    lengths, items = values.data
    if (
        means
        or items.valid is not None
        or not isinstance(items.data, np.ndarray)
        or items.data.dtype.kind not in "biuf"
    ):
        return None
    if not len(lengths) or (lengths != lengths[0]).any():
        return None
    return items.data.reshape(len(lengths), int(lengths[0]))


def _tensor(name: str, data: np.ndarray[Any, Any], dtype: np.dtype[Any], empty: Empty | None) -> torch.Tensor:
    if data.dtype == np.uint64 and dtype == np.int64 and data.max(initial=0) > np.iinfo(np.int64).max:
        raise InvalidInput(
            f"field {name!r} holds {data.max()}, which no int64 tensor holds: give a collate_fn"
        )
    return number_tensor(data, empty, dtype)


def _is_image(column: Column) -> bool:
    return column.means.partition(":")[0] == "image"


def _image_finder(column: Column, mode: ImageMode, name: str, several: bool) -> Callable[[Any], Any] | None:
    """Return a function that decodes the images in a value of a column, None if it holds none. `several`: so do other
    columns."""
    if _is_image(column):
        stated = column.means.partition(":")[2]
        decode = image_decoder(name, Converter(name, mode or stated or None, several))

        def image(value: Any) -> Any:
            raw = value.get("bytes") if isinstance(value, dict) else None
            if raw is None and value is not None:
                raise ValueError(f"its image is not stored with it, but at {value.get('path')!r}")
            return None if raw is None else decode(raw)

        return image
    inner = {child.name: _image_finder(child, mode, name, several) for child in column.children}
    if not any(inner.values()):
        return None
    if column.kind == "struct":
        return lambda value: (
            value
            and {
                key: found(each) if (found := inner[key]) is not None else each for key, each in value.items()
            }
        )
    each = next(found for found in inner.values() if found is not None)
    if column.kind == "coded":
        return each
    return lambda value: value and [each(one) for one in value]
