"""Makes samples of sample ids: locates bytes, reads them in one pass, and cuts, decodes and transforms them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Columns, Fixed, Indirect, Rows
from cachesvc.core.errors import InvalidInput
from loader.datasets.catalog_values import LABEL, describe_classes, value_of, values_of
from loader.datasets.collate import default_collate_into
from loader.datasets.columns.column_batches import columns_batch
from loader.datasets.columns.column_samples import ColumnSamples
from loader.datasets.columns.packed_columns import PackedColumns
from loader.datasets.columns.plain_values import collates_as_torch, plain_column, shaped_batch
from loader.datasets.decoding.decode import Decoder, are_images, decode_field, decoder, is_image
from loader.datasets.decoding.encoded_images import EncodedImage
from loader.datasets.decoding.images import Converter
from loader.datasets.dtypes import check_range, output_dtype
from loader.datasets.generators import RngKey, call_user, rng_parameter
from loader.datasets.jagged import Jagged, offsets_of
from loader.datasets.record_form import RecordForm, torch_dtype
from loader.datasets.sample_spec import SampleSpec
from loader.datasets.targets import (
    DEFAULT_DTYPE,
    check_rows,
    split_targets,
    target_sample,
)
from loader.datasets.text_rows import RowParser
from loader.reading.address_range import Bytes
from loader.reading.reader import ExtentReader, Ints

ROW = "row"
"""The field of rows of text that are not decoded."""
_ALL_STORED: tuple[Any, ...] = ()
"""Stands for the stored values of a row of columns: a null is None, and no field is left out."""


class SampleReader:
    """Makes samples of one catalog. The `rng_key` arguments are those of the generators."""

    def __init__(self, catalog: Catalog, spec: SampleSpec) -> None:
        """Raises InvalidInput for fields that do not exist or cannot be decoded."""
        self._catalog, self._spec = catalog, spec
        self._layout = catalog.layout
        if spec.decode == "cuda" and isinstance(self._layout, Columns):
            raise InvalidInput(
                f"decode='cuda' is for image files in folders, tars and MDS; {catalog.uri} has columns"
            )
        text = isinstance(self._layout, Rows) and bool(self._layout.syntax)
        parsed = text and spec.decode in ("auto", "cuda")
        names = [ROW] if text and not parsed else [field.name for field in catalog.fields]
        self._names = names if spec.fields is None else list(spec.fields)
        self._values = values_of(catalog, spec.fields, names)
        self._columns = [-1 if name in self._values else names.index(name) for name in self._names]
        self._label = value_of(catalog, LABEL)
        self._parser = None
        if parsed:
            stored = [name for name in self._names if name not in self._values]
            self._parser = RowParser(catalog, stored if spec.fields is not None else None)
        if text:
            self._columns = [0]
        self._decoders = None if text else self._decoders_of(spec)
        self._decode_rng = rng_parameter(spec.decode)
        self._transform_rng = rng_parameter(spec.transform)
        self._with_label = spec.fields is None and catalog.labels is not None and len(names) == 1
        self._single = spec.bare or (spec.fields is None and len(names) == 1 and not self._with_label)
        self.gathered = isinstance(self._layout, Fixed) and spec.decode == "auto"
        """Samples are rows of one tensor."""
        self.gathers_batches = (
            self.gathered and spec.transform is None and spec.fields is None and not self._with_label
        )
        """A batch needs no Python call per sample."""
        one = len(self._columns) == 1 and self._columns[0] >= 0 and not self._with_label
        plain = one and spec.decode is None and spec.transform is None
        self.stays_bytes = plain and not isinstance(self._layout, (Fixed, Indirect, Columns))
        """A sample is one range of bytes, handed out unchanged, alone or in a tuple of one."""
        if isinstance(self._layout, Fixed):
            self._dtype = np.dtype(self._layout.dtype)
            self._shape = self._layout.shape
            native = self._dtype.newbyteorder("=")
            out = spec.out or (DEFAULT_DTYPE if spec.targets else None)
            self._out = output_dtype(out) or (native if native != self._dtype else None)
        self._column_samples: ColumnSamples | None = None
        if isinstance(self._layout, Columns):
            stored = [name for name in self._names if name not in self._values]
            self._column_samples = ColumnSamples(catalog, stored, spec.decode, spec.image_mode)
        columns = self._column_samples
        alone = spec.decode == "auto" and spec.transform is None and not self._values
        stored_alone = alone and spec.targets is None and not self._with_label
        self._packed = (
            PackedColumns(catalog, self._columns)
            if stored_alone and PackedColumns.reads(catalog, self._columns)
            else None
        )
        several = len(self._names) > 1 if spec.fields is None else not spec.bare
        parses_columns = stored_alone and several and self._parser is not None and self._parser.has_columns
        self.collates_columns = (
            self._packed is not None
            or parses_columns
            or (alone and columns is not None and not columns.has_images)
        )
        """A batch is made a column at a time."""
        if spec.targets is not None:
            plain = self.gathered and spec.fields is None and not self._with_label
            check_rows(
                spec.targets, self._layout, plain, catalog.format in ("tokens", "litdata"), catalog.uri
            )

    @property
    def sample_kind(self) -> str:
        """The kind of a sample, in words; equal for datasets whose samples fit into one batch."""
        if self._parser is not None and not self._spec.bare:
            return self._parser.sample_kind
        names = [*self._names, *([LABEL] if self._with_label else [])]
        classes = self._describe_labels() if LABEL in names else ""
        if not isinstance(self._layout, Fixed):
            kind = (
                "one value"
                if self._single
                else "a tuple"
                if self._spec.fields or self._with_label
                else "a dict"
            )
            return f"{kind} of {', '.join(names)}{classes}{'' if self._spec.decode else ' in bytes'}"
        rest = f" and {LABEL}{classes}" if LABEL in names else ""
        if self._spec.targets is not None:
            rest += f" with {self._spec.targets} targets"
        return f"{self._out or self._dtype} of shape {list(self._shape)}{rest}"

    def _describe_labels(self) -> str:
        labels = self._catalog.labels
        if labels is not None and labels.ndim == 2:
            return f" of {labels.shape[1]:,} numbers{describe_classes(self._catalog.classes)}"
        is_number = labels is not None and labels.dtype.kind == "f"
        return " as a number" if is_number else describe_classes(self._catalog.classes)

    def locate(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the slots of records and the extents in which they lie, as `ExtentReader.gather` takes them."""
        layout = self._layout
        assert isinstance(layout, Fixed), "only records of one size have slots"
        slots = layout.slots(samples)
        first, last = reader.spans(slots * layout.stride_bytes, np.full(slots.shape, layout.record_bytes))
        return slots, first, last

    def tensor(
        self,
        reader: ExtentReader,
        located: tuple[Ints, Ints, Ints],
        empty: Callable[[int], Bytes] | None = None,
    ) -> torch.Tensor:
        """Return located records as one tensor [n, *shape], in new memory or in memory that `empty` returns for a
        size in bytes."""
        rows = self._stored(reader, located, None if self._out is not None else empty)
        if self._out is not None and empty is not None:
            check_range(self._out, rows, self._catalog.uri)
            given = empty(rows.size * self._out.itemsize).view(self._out).reshape(rows.shape)
            np.copyto(given, rows, casting="unsafe")
            rows = given
        elif self._out is not None:
            check_range(self._out, rows, self._catalog.uri)
            rows = rows.astype(self._out)
        try:
            return torch.from_numpy(rows)
        except TypeError as error:
            raise InvalidInput(
                f"{self._catalog.uri} holds {rows.dtype}, which tensors do not have; give out= to convert, or use array()"
            ) from error

    def gather_batch(
        self,
        reader: ExtentReader,
        located: tuple[Ints, Ints, Ints],
        empty: Callable[[int], Bytes] | None = None,
    ) -> Any:
        """Make a batch of located records under default collation, in new memory or in memory that `empty` returns."""
        if self._spec.targets is None:
            return self.tensor(reader, located, empty)
        rows = self._stored(reader, located, None)
        assert self._out is not None, "targets have a type"
        check_range(self._out, rows, self._catalog.uri)
        return self.batch_of_rows(rows, empty)

    def batch_of_rows(self, rows: np.ndarray[Any, Any], empty: Callable[[int], Bytes] | None = None) -> Any:
        """Make a batch of records [n, *shape]; a list where torch's collation makes a list of tuples."""
        if self._spec.targets is None:
            return torch.from_numpy(rows)
        batch = target_sample(self._spec.targets, *self._columns_of(rows, empty))
        return list(batch) if isinstance(batch, tuple) else batch

    def _columns_of(
        self, rows: np.ndarray[Any, Any], empty: Callable[[int], Bytes] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._spec.targets is not None
        assert self._out is not None
        return split_targets(rows, self._spec.targets, self._out, empty)

    def _stored(
        self, reader: ExtentReader, located: tuple[Ints, Ints, Ints], empty: Callable[[int], Bytes] | None
    ) -> np.ndarray[Any, Any]:
        """Return located records [n, *shape] of the stored dtype."""
        records = reader.gather(*located, empty)
        return records.view(self._dtype).reshape(len(records), *self._shape)

    def column_batch(
        self,
        reader: ExtentReader,
        located: tuple[Ints, Ints, Ints],
        empty: Callable[[int], Bytes] | None = None,
    ) -> Any:
        """Make a batch of samples of columns under default collation; `located` begins with the samples."""
        samples = located[0]
        as_tuple = self._spec.fields is not None and not self._spec.bare
        if self._column_samples is not None:
            batch = columns_batch(self._column_samples, reader, samples, empty, as_tuple)
        else:
            found = self._plain_columns(reader, samples, empty) if collates_as_torch() else None
            batch = None if found is None else shaped_batch(self._names, found, as_tuple)
        if batch is None:
            rows = self.iter_samples(reader, samples, (0, 0))
            return default_collate_into(
                empty, rows, len(samples), lambda place: self._catalog.key(int(samples[place]))
            )
        return batch

    def _plain_columns(
        self, reader: ExtentReader, samples: Ints, empty: Callable[[int], Bytes] | None
    ) -> list[Any] | None:
        """Return texts and tensors of the chosen fields; None where rows are to be collated."""
        if self._packed is not None:
            return self._packed.batch(reader, samples, empty)
        assert self._parser is not None, "other rows have no columns"
        addresses, lengths = self._catalog.locate(samples)
        raw = [row or b"" for row in reader.read(addresses[:, 0], lengths[:, 0])]
        found = [plain_column(each, empty) for each in self._parser.columns(samples, raw)]
        return None if any(each is None for each in found) else found

    @property
    def record_bytes(self) -> int:
        """Size of a sample, where all have the same size."""
        assert isinstance(self._layout, Fixed), "only records of one size have it"
        return self._layout.record_bytes

    @property
    def record_form(self) -> RecordForm | None:
        """The form of records whose batches need no Python call per sample and no check of their values; None for
        other samples."""
        if not (self.gathers_batches and isinstance(self._layout, Fixed)):
            return None
        stored, out = torch_dtype(self._dtype), None if self._out is None else torch_dtype(self._out)
        converts = self._out is None or (out is not None and np.can_cast(self._dtype, self._out, "safe"))
        if stored is None or not converts:
            return None
        layout = self._layout
        return RecordForm(
            layout.record_bytes, layout.stride_bytes, stored, self._shape, out, self._spec.targets
        )

    def ranges(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """Return the begin and end of samples that stay bytes, and the extents in which they lie, as `jagged` takes
        them."""
        addresses, lengths = (array[:, self._columns[0]] for array in self._catalog.locate(samples))
        lengths = np.maximum(lengths, 0)  # absent fields are empty
        return addresses, addresses + lengths, *reader.spans(addresses, lengths)

    def jagged(
        self,
        reader: ExtentReader,
        ranges: tuple[Ints, Ints, Ints, Ints],
        empty: Callable[[int], Bytes] | None = None,
    ) -> Jagged:
        """Return samples that stay bytes, back to back, in new memory or in memory that `empty` returns."""
        values = torch.from_numpy(reader.join(*ranges, empty))
        return Jagged(values, torch.from_numpy(offsets_of(ranges[1] - ranges[0])))

    def expect(self, reader: ExtentReader, samples: Ints) -> None:
        """Start reading samples that come next; see `ExtentReader.expect`. Does nothing if a table in the extent says
        where samples lie."""
        if not isinstance(self._layout, (Indirect, Columns)):
            addresses, lengths = self._catalog.locate(samples)
            columns = [column for column in self._columns if column >= 0]
            reader.expect(addresses[:, columns].ravel(), lengths[:, columns].ravel())

    def take(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> list[Any]:
        """Return samples in the order given."""
        return list(self.iter_samples(reader, samples, rng_key))

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """Make samples one at a time: all bytes are read at once, and each sample is decoded and transformed on
        demand."""
        rows = (
            self._gathered_rows(reader, samples)
            if self.gathered
            else self._decoded_rows(reader, samples, rng_key)
        )
        transform = self._spec.transform
        if transform is None:
            return rows
        pairs = zip(rows, samples.tolist(), strict=True)
        return (call_user(self._catalog, transform, self._transform_rng, row, n, rng_key) for row, n in pairs)

    def _gathered_rows(self, reader: ExtentReader, samples: Ints) -> Iterator[Any]:
        values = self.tensor(reader, self.locate(reader, samples))
        if self._spec.targets is not None:
            pairs = zip(*self._columns_of(values.numpy()), strict=True)
            return (target_sample(self._spec.targets, *pair) for pair in pairs)
        rows = zip(values, samples.tolist(), strict=True)
        return (self._shape_sample((value,), n, (value,)) for value, n in rows)

    def _decoded_rows(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        if self._column_samples is not None:
            return self._column_rows(self._column_samples, reader, samples, rng_key)
        raw = self._read_fields(reader, samples)
        if self._parser is not None:
            parsed = self._parser.parse(samples, [row[0] or b"" for row in raw])
            if not self._values:
                return (row[0] for row in parsed) if self._spec.bare else parsed
            return (self._shape_sample(row, n, row) for row, n in zip(parsed, samples.tolist(), strict=True))
        if self._spec.decode is None and self._single:
            return (row[0] for row in raw)
        rows = zip(raw, samples.tolist(), strict=True)
        decode = self._spec.decode
        if not callable(decode):
            return (
                self._shape_sample(row if self._decoders is None else self._decode_row(row, n), n, row)
                for row, n in rows
            )
        shaped = ((self._shape_sample(row, n, row), n) for row, n in rows)
        return (call_user(self._catalog, decode, self._decode_rng, row, n, rng_key) for row, n in shaped)

    def _column_rows(
        self, columns: ColumnSamples, reader: ExtentReader, samples: Ints, rng_key: RngKey
    ) -> Iterator[Any]:
        rows = zip(columns.decoded_rows(reader, samples), samples.tolist(), strict=True)
        shaped = ((self._shape_sample(row, n, _ALL_STORED), n) for row, n in rows)
        decode = self._spec.decode
        if not callable(decode):
            return (row for row, _ in shaped)
        return (call_user(self._catalog, decode, self._decode_rng, row, n, rng_key) for row, n in shaped)

    def _decode_row(self, row: Sequence[Any], sample: int) -> tuple[Any, ...]:
        assert self._decoders is not None
        return tuple(
            decode_field(decode, value, lambda: f"{self._catalog.key(sample)} in {self._catalog.uri}")
            for decode, value in zip(self._decoders, row, strict=True)
        )

    def _read_fields(self, reader: ExtentReader, samples: Ints) -> list[Sequence[Any]]:
        """Read the chosen fields' bytes of each sample. The label is not among them."""
        columns = [column for column in self._columns if column >= 0]
        addresses, lengths = self._catalog.locate(samples)
        if isinstance(self._layout, Indirect):
            pairs = reader.read(addresses[:, 0], lengths[:, 0])
            offsets = np.frombuffer(b"".join(pair or b"" for pair in pairs), "<u4").reshape(-1, 2)
            addresses, lengths = self._catalog.settle(samples, offsets)
            whole = reader.read(addresses[:, 0], lengths[:, 0])
            split = [self._catalog.split(row or b"") for row in whole]
            return [[row[column] for column in columns] for row in split]
        if columns != list(range(addresses.shape[1])):
            addresses, lengths = addresses[:, columns], lengths[:, columns]
        flat = reader.read(np.ascontiguousarray(addresses).ravel(), np.ascontiguousarray(lengths).ravel())
        width = max(1, len(columns))
        return (
            [flat[at : at + width] for at in range(0, len(flat), width)] if columns else [()] * len(samples)
        )

    def _shape_sample(self, values: Sequence[Any], sample: int, stored: Sequence[Any]) -> Any:
        """Return a tuple if fields were named, the value of a field that was named alone, (value, label) for one
        field with labels, the value for one field, otherwise a dict by field. Fields that are not `stored` are left
        out of the dict; a stored value may be None, as JSON's null."""
        if self._spec.fields is not None:
            given = iter(values)
            held = self._values
            named = tuple(held[name](sample) if name in held else next(given) for name in self._names)
            return named[0] if self._spec.bare else named
        if self._with_label and self._label is not None:
            return values[0], self._label(sample)
        if len(values) == 1:
            return values[0]
        if stored is _ALL_STORED:
            return dict(zip(self._names, values, strict=True))
        fields = zip(self._names, values, stored, strict=True)
        return {name: value for name, value, held in fields if held is not None}

    def _decoders_of(self, spec: SampleSpec) -> list[Decoder] | None:
        if spec.decode not in ("auto", "cuda") or isinstance(self._layout, (Fixed, Columns)):
            return None
        fields = [self._catalog.fields[column] for column in self._columns if column >= 0]
        several = are_images(field.encoding for field in self._catalog.fields)
        return [
            EncodedImage
            if spec.decode == "cuda" and is_image(field.encoding)
            else decoder(field.name, field.encoding, Converter(field.name, spec.image_mode, several))
            for field in fields
        ]
