"""The seam between kinds of samples and what reads them, and the choice of the kind that a catalog holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from torch.utils.data import default_collate

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Columns, Fixed, Indirect, Rows
from cachesvc.core.errors import InvalidInput
from loader.datasets.generators import RngKey
from loader.datasets.plain_values import Empty
from loader.datasets.samples.columns import ColumnSamples
from loader.datasets.samples.fields import FieldSamples
from loader.datasets.samples.packed_rows import PackedRowSamples
from loader.datasets.samples.records import RecordSamples
from loader.datasets.samples.sample_form import SampleForm, SampleSpec
from loader.datasets.samples.text_rows import TextRowSamples
from loader.datasets.targets import check_rows
from loader.reading.reader import ExtentReader, Ints

ROW = "row"
"""The field of rows of text that are not decoded."""


class Gather(Protocol):
    """Makes batches without a Python call per sample."""

    def locate(self, reader: ExtentReader, samples: Ints) -> tuple[Ints, ...]:
        """Return arrays by sample that say where samples lie; the last two are the first and the last extent."""
        ...

    def make(self, reader: ExtentReader, located: Sequence[Ints], empty: Empty | None) -> Any:
        """Make a batch of located samples, in new memory or in memory that `empty` returns for a size in bytes."""
        ...


class SampleReader(Protocol):
    """Makes samples of one catalog."""

    sample_kind: str
    """The kind of a sample, in words; equal for datasets whose samples fit into one batch."""

    @property
    def places(self) -> Callable[[Ints], tuple[Ints, Ints]] | None:
        """Returns the addresses and lengths of what is read; None if a table in the extent says where samples lie."""
        ...

    def iter_samples(self, reader: ExtentReader, samples: Ints, rng_key: RngKey) -> Iterator[Any]:
        """Make samples one at a time: all bytes are read at once, and each sample is decoded and transformed on
        demand."""
        ...

    def gather(self, collate: Callable[..., Any]) -> Gather | None:
        """Return what makes the batches that `collate` makes of these samples; None where each sample needs Python."""
        ...


def sample_reader(catalog: Catalog, spec: SampleSpec) -> SampleReader:
    """Return what makes samples of a catalog. Raises InvalidInput for fields that do not exist or cannot be decoded, and
    for samples that cannot have targets."""
    layout, decodes = catalog.layout, spec.decode in ("auto", "cuda")
    if spec.decode == "cuda" and isinstance(layout, Columns):
        raise InvalidInput(
            f"decode='cuda' is for image files in folders, tars and MDS; {catalog.uri} has columns"
        )
    is_text = isinstance(layout, Rows) and bool(layout.syntax)
    names = [ROW] if is_text and not decodes else [field.name for field in catalog.fields]
    form = SampleForm(catalog, spec, names, in_one=is_text and decodes)
    is_gathered = isinstance(layout, Fixed) and spec.decode == "auto"
    if spec.targets is not None:
        plain = is_gathered and spec.fields is None and form.label is None
        check_rows(spec.targets, layout, plain, catalog.format in ("tokens", "litdata"), catalog.uri)
    if isinstance(layout, Fixed) and is_gathered:
        return RecordSamples(form, layout)
    if isinstance(layout, Columns):
        return ColumnSamples(form, layout)
    if isinstance(layout, Indirect):
        return PackedRowSamples(form, layout)
    return TextRowSamples(form) if is_text and decodes else FieldSamples(form)


def gathered_records(samples: SampleReader) -> RecordSamples | None:
    """Return samples that are records whose default batches need no Python call per sample; None for others."""
    found = samples.gather(default_collate)
    return found if isinstance(found, RecordSamples) else None
