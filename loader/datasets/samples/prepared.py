"""Samples that a user's function has prepared: gathered from the daemon's extents, or made here where it has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import OFFSET_BYTES, Prepared, PreparedField
from loader.datasets.generators import RngKey, call_user, rng_parameter
from loader.datasets.plain_values import Empty, collates_as_torch
from loader.datasets.samples.sample_form import SampleSpec
from loader.prepare.preparer import Maker, Preparers
from loader.prepare.records import CONTENT_AT, END, MADE, contained, encode, error_in, value_of
from loader.prepare.uneven import decode_uneven, encode_uneven, uneven_error
from loader.reading.prepared_grants import NotPrepared
from loader.reading.reader import ExtentReader, Ints

_Array = np.ndarray[Any, Any]
_T = TypeVar("_T")


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
        shapes = (
            f"{each.name}: {np.dtype(each.dtype)} {'of any shape' if layout.most_bytes else list(each.shape)}"
            for each in layout.fields
        )
        self.sample_kind = f"{source.form.container} of {', '.join(shapes)}"

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """See `SampleReader`."""
        _, extents, _ = self.locate(reader, samples)
        rows = self._uneven_rows if self._layout.most_bytes else self._rows
        for values, sample in zip(rows(reader, samples, extents), samples.tolist(), strict=True):
            made = contained(self._source.form, values)
            if self._transform is not None:
                made = call_user(self._source.catalog, self._transform, self._rng, made, sample, rng_key)
            yield made

    def gather(self, collate: Callable[..., Any]) -> PreparedSamples | None:
        """See `SampleReader`."""
        plain = collate is default_collate and collates_as_torch() and self._transform is None
        return self if plain and not self._layout.most_bytes else None

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

        def gathered(here: _Array) -> tuple[list[_Array], dict[int, Exception]]:
            return self._gathered(reader, samples[here], extents[here], empty if here.all() else None)

        here, (columns, errors) = self._read_present(extents, gathered)
        if here.all():
            return columns, errors
        rows = np.flatnonzero(here)
        whole = [np.empty((len(samples), *column.shape[1:]), column.dtype) for column in columns]
        for into, column in zip(whole, columns, strict=True):
            into[rows] = column
        errors = {int(rows[row]): error for row, error in errors.items()}
        self._make_here(reader, samples, np.flatnonzero(~here), whole)
        return whole, errors

    def _read_present(self, extents: Ints, read: Callable[[_Array], _T]) -> tuple[_Array, _T]:
        """Return which rows are of extents that the daemon has, and what `read` returns for these."""
        absent = frozenset[int]()
        with self._preparers.beside():
            while True:
                here = ~np.isin(extents, list(absent))
                try:
                    return here, read(here)
                except NotPrepared as refusal:
                    absent |= refusal.extents

    def _rows(self, reader: ExtentReader, samples: Ints, extents: Ints) -> Iterator[list[Any]]:
        """Yield the values of each sample. Raises the error of one that could not be made."""
        columns, errors = self._columns(reader, samples, extents, None)
        for row in range(len(samples)):
            if row in errors:
                raise errors[row]
            yield [
                value_of(field, column[row, ...])
                for field, column in zip(self._layout.fields, columns, strict=True)
            ]

    def _uneven_rows(self, reader: ExtentReader, samples: Ints, extents: Ints) -> Iterator[list[Any]]:
        """Yield the values of each sample. Raises the error of one that could not be made."""

        def records_of(here: _Array) -> list[bytes]:
            places = self._layout.locate(samples[here])[0][:, 0]
            pairs = reader.items(places, 2 * OFFSET_BYTES, extents[here]).view("<u8").reshape(-1, 2)
            return [record or b"" for record in reader.read(*self._layout.settle(samples[here], pairs))]

        here, found = self._read_present(extents, records_of)
        records, form, source = iter(found), self._source.form, self._source
        width = END.size - CONTENT_AT
        contents = b"".join(record[CONTENT_AT : END.size].ljust(width) for record in found)
        source.note_contents(samples[here], np.frombuffer(contents, np.uint8).reshape(len(found), width))
        absent = iter(()) if here.all() else source.samples(samples[~here])
        for is_here, sample in zip(here.tolist(), samples.tolist(), strict=True):
            if is_here:
                record: bytes | bytearray = next(records)
                key = f"{source.catalog.key(sample)} of {source.catalog.uri}"
                if error := uneven_error(form, record, key):
                    raise error
            else:
                record = encode_uneven(form, next(absent))
                reader.count_prepared(len(record))
            yield decode_uneven(form, record)

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
