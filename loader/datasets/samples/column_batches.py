"""Makes batches a column at a time, as torch's default collation makes them of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from loader.datasets.generators import RngKey
from loader.datasets.plain_values import Empty, collates_as_torch, shaped_batch
from loader.datasets.samples.sample_form import SampleForm
from loader.reading.reader import ExtentReader, Ints

_NO_KEY = (0, 0)  # no function of the user's draws numbers for samples that are gathered


@dataclass(frozen=True, slots=True)
class ColumnBatches:
    """`columns` reads each column of samples; it returns None where `samples` are to be made one by one, and collated."""

    form: SampleForm
    columns: Callable[[ExtentReader, Ints, Empty | None], Sequence[Any] | None]
    samples: Callable[[ExtentReader, Ints, RngKey], Iterator[Any]]

    def locate(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, ...]:
        """Return the samples: their columns are found as they are read."""
        return samples, samples, samples

    def make(self, reader: ExtentReader, located: tuple[Ints, ...], empty: Empty | None) -> Any:
        """Make a batch; in rows where the user has registered functions of collation."""
        ids, form = located[0], self.form
        columns = self.columns(reader, ids, empty) if collates_as_torch() else None
        if columns is None:
            return form.collated(self.samples(reader, ids, _NO_KEY), ids, empty)
        return shaped_batch(form.names, columns, form.spec.fields is not None and not form.spec.bare)
