"""Records of one size: a batch is one tensor, or two where tokens have targets, gathered in one pass over memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import default_collate

from cachesvc.catalog.layout import Fixed
from cachesvc.core.errors import InvalidInput
from loader.datasets.dtypes import check_range, output_dtype
from loader.datasets.generators import RngKey
from loader.datasets.plain_values import Empty, number_tensor
from loader.datasets.samples.catalog_values import LABEL
from loader.datasets.samples.sample_form import SampleForm
from loader.datasets.targets import DEFAULT_DTYPE, Targets, split_targets, target_sample
from loader.reading.reader import ExtentReader, Ints


@dataclass(frozen=True, slots=True)
class RecordForm:
    """The layout of records, for a device. They lie at multiples of `stride_bytes`, and are arrays of `stored` and
    `shape`. `out` is the type of batches, None where it is `stored`."""

    record_bytes: int
    stride_bytes: int
    stored: torch.dtype
    shape: tuple[int, ...]
    out: torch.dtype | None
    targets: Targets | None


class RecordSamples:
    """Samples that are rows of one tensor."""

    def __init__(self, form: SampleForm, layout: Fixed) -> None:
        """Raises InvalidInput for an `out` that tensors do not have."""
        self._form, self._layout, self._targets = form, layout, form.spec.targets
        self.places = form.places
        self._dtype: np.dtype[Any] = np.dtype(layout.dtype)
        native = self._dtype.newbyteorder("=")
        out = form.spec.out or (DEFAULT_DTYPE if self._targets else None)
        self._out = output_dtype(out) or (native if native != self._dtype else None)
        label = f" and {LABEL}{form.classes}" if LABEL in form.values else ""
        targets = f" with {self._targets} targets" if self._targets is not None else ""
        self.sample_kind = f"{self._out or self._dtype} of shape {list(layout.shape)}{label}{targets}"

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """See `SampleReader`."""
        located = self.locate(reader, samples)
        if self._targets is not None:
            pairs = zip(*self._split(self._checked(self._stored(reader, located)), None), strict=True)
            of_pairs = (target_sample(self._targets, *pair) for pair in pairs)
            return self._form.finished(of_pairs, samples, rng_key)
        width = len(self._form.stored)
        rows = ((value,) * width for value in self.tensor(reader, located))
        return self._form.samples(rows, samples, rng_key)

    def gather(self, collate: Callable[..., Any]) -> RecordSamples | None:
        """See `SampleReader`."""
        plain = self._form.is_plain and self._form.spec.fields is None
        return self if plain and collate is default_collate else None

    def locate(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, ...]:
        """Return the slots of records and the extents in which they lie, as `ExtentReader.gather` takes them."""
        layout = self._layout
        slots = layout.slots(samples)
        first, last = reader.spans(slots * layout.stride_bytes, np.full(slots.shape, layout.record_bytes))
        return slots, first, last

    def make(self, reader: ExtentReader, located: Sequence[Ints], empty: Empty | None) -> Any:
        """Make a batch of located records, as default collation does."""
        if self._targets is None:
            return self.tensor(reader, located, empty)
        return self.batch_of_rows(self._checked(self._stored(reader, located)), empty)

    def tensor(
        self, reader: ExtentReader, located: Sequence[Ints], empty: Empty | None = None
    ) -> torch.Tensor:
        """Return located records as one tensor [n, *shape]. Raises InvalidInput for numbers that `out` does not hold, and
        for types that tensors do not have."""
        rows = self._stored(reader, located, None if self._out is not None else empty)
        try:
            if self._out is None:
                return torch.from_numpy(rows)
            return number_tensor(self._checked(rows), empty, self._out)
        except TypeError as error:
            raise InvalidInput(
                f"{self._form.catalog.uri} holds {rows.dtype}, which tensors do not have; give out= to convert, or use "
                "array()"
            ) from error

    def batch_of_rows(self, rows: np.ndarray[Any, Any], empty: Empty | None = None) -> Any:
        """Make a batch of records [n, *shape]; a list where torch's collation makes a list of tuples."""
        if self._targets is None:
            return torch.from_numpy(rows)
        batch = target_sample(self._targets, *self._split(rows, empty))
        return list(batch) if isinstance(batch, tuple) else batch

    @property
    def record_form(self) -> RecordForm | None:
        """The form of records whose values need no check; None for others."""
        stored, out = _torch_dtype(self._dtype), None if self._out is None else _torch_dtype(self._out)
        converts = self._out is None or (out is not None and np.can_cast(self._dtype, self._out, "safe"))
        if stored is None or not converts:
            return None
        layout = self._layout
        return RecordForm(layout.record_bytes, layout.stride_bytes, stored, layout.shape, out, self._targets)

    def _stored(
        self, reader: ExtentReader, located: Sequence[Ints], empty: Empty | None = None
    ) -> np.ndarray[Any, Any]:
        """Return located records [n, *shape] of the stored dtype."""
        slots, first, last = located
        records = reader.gather(slots, first, last, empty)
        return records.view(self._dtype).reshape(len(records), *self._layout.shape)

    def _checked(self, rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        assert self._out is not None, "rows are converted"
        check_range(self._out, rows, self._form.catalog.uri)
        return rows

    def _split(self, rows: np.ndarray[Any, Any], empty: Empty | None) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._targets is not None, "there are targets"
        assert self._out is not None, "targets have a type"
        return split_targets(rows, self._targets, self._out, empty)


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype | None:
    """Return torch's type of the same bytes; None if there is none."""
    if not dtype.isnative:
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except TypeError:
        return None
