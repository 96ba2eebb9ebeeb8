"""Fields of files and of members of tars, each at a place of its own, and whatever else stays bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from cachesvc.catalog.layout import Fixed
from loader.datasets.decoding.decode import Decoder, are_images, decoder, is_image
from loader.datasets.decoding.encoded_images import EncodedImage
from loader.datasets.decoding.images import Converter
from loader.datasets.generators import RngKey
from loader.datasets.jagged import Jagged, jagged, offsets_of
from loader.datasets.plain_values import Empty
from loader.datasets.samples.sample_form import Row, SampleForm
from loader.reading.reader import ExtentReader, Ints


class FieldValues:
    """Makes samples of the bytes of fields, each decoded by its own encoding."""

    def __init__(self, form: SampleForm) -> None:
        """Raises InvalidInput for fields that cannot be decoded."""
        self._form, spec, catalog = form, form.spec, form.catalog
        several = are_images(field.encoding for field in catalog.fields)
        self._decoders: list[Decoder] | None = None
        if spec.decode in ("auto", "cuda") and not isinstance(catalog.layout, Fixed):
            self._decoders = [
                EncodedImage
                if spec.decode == "cuda" and is_image(field.encoding)
                else decoder(field.name, field.encoding, Converter(field.name, spec.image_mode, several))
                for field in (catalog.fields[column] for column in form.columns)
            ]

    def samples(self, rows: Sequence[Row], samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """Make samples of rows, each decoded on demand."""
        decoders = self._decoders
        decoded = map(tuple, rows) if decoders is None else self._form.decoded(rows, samples, decoders)
        return self._form.samples(decoded, samples, rng_key, rows)


class FieldSamples:
    """Samples of fields that lie anywhere."""

    def __init__(self, form: SampleForm) -> None:
        """Raises InvalidInput for fields that cannot be decoded."""
        self._form, self._values, self.sample_kind = form, FieldValues(form), form.kind
        self.places = form.places

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """See `SampleReader`."""
        return self._values.samples(self._form.read(reader, samples), samples, rng_key)

    def gather(self, collate: Callable[..., Any]) -> FieldSamples | None:
        """See `SampleReader`. Samples that stay bytes are joined, alone or in tuples of one."""
        form = self._form
        stays_bytes = form.is_plain and form.spec.decode is None and len(form.names) == 1
        return self if stays_bytes and collate is jagged else None

    def locate(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, ...]:
        """Return the begin and end of samples, and the extents in which they lie."""
        addresses, lengths = (places[:, 0] for places in self._form.places(samples))
        lengths = np.maximum(lengths, 0)  # absent fields are empty
        return addresses, addresses + lengths, *reader.spans(addresses, lengths)

    def make(self, reader: ExtentReader, located: Sequence[Ints], empty: Empty | None) -> Jagged:
        """Return located samples back to back."""
        begin, end, first, last = located
        values = torch.from_numpy(reader.join(begin, end, first, last, empty))
        return Jagged(values, torch.from_numpy(offsets_of(end - begin)))
