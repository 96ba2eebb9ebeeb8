"""Makes rows and batches of the chosen columns of a catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Columns
from cachesvc.core.errors import CorruptData
from cachesvc.sources.columnar.column import Column, firsts
from loader.datasets.columns.column_reader import ColumnFacts, ColumnReader, Values
from loader.datasets.columns.to_python import python_values, stored_values
from loader.datasets.decoding.decode import MEND, decode_field
from loader.datasets.decoding.images import Converter, ImageMode, image_decoder
from loader.reading.reader import ExtentReader, Ints

_UNREADABLE = (ValueError, OverflowError, TypeError, LookupError)
"""Errors of values that Python cannot hold; UnicodeDecodeError is one of them."""


@dataclass(frozen=True, slots=True)
class Found:
    """The values of one column for a run of samples of one schema."""

    column: Column
    values: Values


class ColumnSamples:
    """Reads the chosen fields of samples. `decode`: "auto" for Python's values, else the bytes that are stored. "cuda" is
    as "auto": pictures in columns are decoded here."""

    def __init__(self, catalog: Catalog, names: Sequence[str], decode: Any, image_mode: ImageMode) -> None:
        """Raises InvalidInput for images where Pillow is not installed."""
        assert isinstance(catalog.layout, Columns), "only columns are read so"
        self._catalog, self._layout, self._names = catalog, catalog.layout, names
        self._facts = ColumnFacts(catalog, catalog.layout)
        self._decode: Literal["auto"] | None = "auto" if decode in ("auto", "cuda") else None
        self._places = [self._places_of(schema) for schema in catalog.layout.schemas]
        columns = [column for column, _ in self._places[0]] if self._places else []
        images = (
            sum(any(map(_is_image, each.nodes())) for each in catalog.layout.schemas[0]) if columns else 0
        )
        self._images = [
            _image_finder(column, image_mode, name, images > 1) if self._decode else None
            for column, name in zip(columns, names, strict=False)
        ]

    def _places_of(self, schema: Sequence[Column]) -> list[tuple[Column, int]]:
        """Return the chosen columns of a schema, and the number of the first buffer of each."""
        places = {column.name: (column, first) for column, first in zip(schema, firsts(schema), strict=False)}
        return [places[name] for name in self._names]

    def find(self, reader: ExtentReader, samples: Ints) -> list[Found] | None:
        """Return the chosen columns of samples; None if these are of several schemas."""
        chunks, rows = self._layout.rows(samples)
        kinds = self._layout.chunk_schema[chunks]
        if len(samples) and (kinds != kinds[0]).any():
            return None
        columns = ColumnReader(self._catalog, self._layout, self._facts, reader)
        places = self._places[int(kinds[0]) if len(kinds) else 0]
        return [Found(column, columns.read(column, first, chunks, rows)) for column, first in places]

    def rows(self, reader: ExtentReader, samples: Ints) -> list[tuple[Any, ...]]:
        """Return the values of each sample in the order of the chosen fields. Images are not decoded yet."""
        found = self.find(reader, samples)
        if found is None:
            out: list[tuple[Any, ...]] = [()] * len(samples)
            kinds = self._layout.chunk_schema[self._layout.rows(samples)[0]]
            for kind in np.unique(kinds).tolist():
                mine = np.flatnonzero(kinds == kind)
                for at, row in zip(mine.tolist(), self.rows(reader, samples[mine]), strict=True):
                    out[at] = row
            return out
        if not found:
            return [()] * len(samples)
        try:
            return list(zip(*map(self.values, found), strict=True))
        except _UNREADABLE as error:
            if len(samples) > 1:
                return [row for at in range(len(samples)) for row in self.rows(reader, samples[at : at + 1])]
            raise CorruptData(
                f"{self._catalog.key(int(samples[0]))} in {self._catalog.uri} does not decode: {error}; {MEND}"
            ) from error

    def values(self, found: Found) -> list[Any]:
        """Return a column as Python's values. Raises what `python_values` raises."""
        if self._decode is None:
            return stored_values(found.column, found.values)
        return python_values(found.column, found.values, arrays=True)

    @property
    def has_images(self) -> bool:
        """True if a field holds images that are decoded."""
        return any(each is not None for each in self._images)

    def decoded_rows(self, reader: ExtentReader, samples: Ints) -> Iterator[tuple[Any, ...]]:
        """Yield the values of each sample, each with its images decoded on demand."""
        rows = self.rows(reader, samples)
        if not self.has_images:
            return iter(rows)
        return (self.with_images(row, n) for row, n in zip(rows, samples.tolist(), strict=True))

    @property
    def names(self) -> Sequence[str]:
        """The chosen fields."""
        return self._names

    def name_in(self, samples: Ints) -> Callable[[int], str]:
        """Return the function that names the sample in a row of a batch."""
        return lambda place: self._catalog.key(int(samples[place]))

    def with_images(self, row: tuple[Any, ...], sample: int) -> tuple[Any, ...]:
        """Return a row with its images decoded. Raises CorruptData, which names the sample."""
        return tuple(
            value
            if decode is None
            else decode_field(decode, value, lambda: f"{self._catalog.key(sample)} in {self._catalog.uri}")
            for decode, value in zip(self._images, row, strict=True)
        )


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
