"""Samples that a user's function has prepared: gathered from the daemon's extents, or made here where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import default_collate

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Prepared, PreparedField
from loader.datasets.generators import RngKey, call_user, rng_parameter
from loader.datasets.plain_values import Empty, collates_as_torch
from loader.datasets.samples.sample_form import SampleSpec
from loader.prepare.preparer import Maker, Preparers
from loader.prepare.records import CONTENT_AT, END, MADE, contained, encode, error_in, value_of
from loader.reading.prepared_grants import NotPrepared
from loader.reading.reader import ExtentReader, Ints

_Array = np.ndarray[Any, Any]


class SamplesOf(Maker, Protocol):
    """Makes prepared samples from their source."""

    @property
    def catalog(self) -> Catalog:
        """The source's."""
        ...

    def note_contents(self, samples: Ints, contents: _Array) -> None:
        """Enter digests of the bytes that samples were made of, uint8[n, 16]."""
        ...


class PreparedSamples:
    """Samples of one prepared dataset. Sample n is what the function makes of sample n of the source."""

    def __init__(self, catalog: Catalog, source: SamplesOf, spec: SampleSpec, preparers: Preparers) -> None:
        """`preparers` prepare for the daemon while this process reads."""
        layout = catalog.layout
        assert isinstance(layout, Prepared), "another layout has other samples"
        self._catalog, self._layout, self._source, self._preparers = catalog, layout, source, preparers
        self.places = layout.locate
        self._transform, self._rng = spec.transform, rng_parameter(spec.transform)
        shapes = (f"{each.name}: {np.dtype(each.dtype)} {list(each.shape)}" for each in layout.fields)
        self.sample_kind = f"{source.form.container} of {', '.join(shapes)}"

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """See `SampleReader`."""
        _, extents, _ = self.locate(reader, samples)
        columns, errors = self._columns(reader, samples, extents, None)
        for row, sample in enumerate(samples.tolist()):
            if row in errors:
                raise errors[row]
            values = [
                value_of(field, column[row, ...])
                for field, column in zip(self._layout.fields, columns, strict=True)
            ]
            made = contained(self._source.form, values)
            if self._transform is not None:
                made = call_user(self._source.catalog, self._transform, self._rng, made, sample, rng_key)
            yield made

    def gather(self, collate: Callable[..., Any]) -> PreparedSamples | None:
        """See `SampleReader`."""
        plain = collate is default_collate and collates_as_torch() and self._transform is None
        return self if plain else None

    def locate(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, ...]:
        """Return the samples, and the extents in which they lie."""
        extents = np.searchsorted(self._layout.first, samples, "right") - 1
        return samples, extents, extents

    def make(self, reader: ExtentReader, located: Sequence[Ints], empty: Empty | None) -> Any:
        """Make a batch of located samples, as default collation does. Raises the error of the first bad one."""
        samples, extents = located[0], located[1]
        columns, errors = self._columns(reader, samples, extents, empty)
        if errors:
            raise errors[min(errors)]
        tensors = [torch.from_numpy(column) for column in columns]
        container = self._source.form.container
        return contained(self._source.form, tensors) if container in ("value", "dict") else tensors

    def _columns(
        self, reader: ExtentReader, samples: Ints, extents: Ints, empty: Empty | None
    ) -> tuple[list[_Array], dict[int, Exception]]:
        """Return the values of each field [n, *shape], and the errors of rows that could not be made."""
        absent = frozenset[int]()
        with self._preparers.beside():
            while True:
                here = ~np.isin(extents, list(absent))
                try:
                    columns, errors = self._gathered(
                        reader, samples[here], extents[here], None if absent else empty
                    )
                    break
                except NotPrepared as refusal:
                    absent |= refusal.extents
        if not absent:
            return columns, errors
        rows = np.flatnonzero(here)
        whole = [np.empty((len(samples), *column.shape[1:]), column.dtype) for column in columns]
        for into, column in zip(whole, columns, strict=True):
            into[rows] = column
        errors = {int(rows[row]): error for row, error in errors.items()}
        self._make_here(reader, samples, np.flatnonzero(~here), whole)
        return whole, errors

    def _gathered(
        self, reader: ExtentReader, samples: Ints, extents: Ints, empty: Empty | None
    ) -> tuple[list[_Array], dict[int, Exception]]:
        """Read prepared samples. Raises NotPrepared where the daemon does not have them."""
        addresses, count, stride = (
            self._layout.locate(samples)[0][:, 0],
            len(samples),
            self._layout.stride_bytes,
        )
        ends = reader.items(addresses + stride - END.size, END.size, extents).reshape(count, END.size)
        states = ends[:, :2].copy().view("<u2")[:, 0]
        self._source.note_contents(samples[states > 0], ends[states > 0, CONTENT_AT:])
        columns = [self._field(reader, field, addresses, extents, empty) for field in self._layout.fields]
        errors: dict[int, Exception] = {}
        for row in np.flatnonzero(states != MADE).tolist():
            (record,) = reader.read(addresses[row : row + 1], np.asarray([stride]))
            key = f"{self._source.catalog.key(int(samples[row]))} of {self._source.catalog.uri}"
            errors[row] = error_in(record or b"", key)
        return columns, errors

    def _field(
        self, reader: ExtentReader, field: PreparedField, addresses: Ints, extents: Ints, empty: Empty | None
    ) -> _Array:
        dtype = np.dtype(field.dtype)
        width, shape = int(dtype.itemsize * np.prod(field.shape)), (len(addresses), *field.shape)
        if not width:
            return np.empty(shape, dtype)
        return reader.items(addresses + field.offset, width, extents, empty).view(dtype).reshape(shape)

    def _make_here(self, reader: ExtentReader, samples: Ints, rows: Ints, columns: Sequence[_Array]) -> None:
        """Make samples in this process. Raises the error of one that cannot be made."""
        form = self._source.form
        for row, sample in zip(rows.tolist(), self._source.samples(samples[rows]), strict=True):
            record = encode(form, sample)
            for field, column in zip(form.fields, columns, strict=True):
                column[row] = np.ndarray(field.shape, field.dtype, record, field.offset)
        reader.count_prepared(len(rows) * form.stride_bytes)
