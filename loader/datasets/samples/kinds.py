"""Chooses the kind of samples that a catalog holds, as the user asked for them."""

from __future__ import annotations

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.layout import Columns, Fixed, Indirect, Rows
from cachesvc.core.errors import InvalidInput
from loader.datasets.samples.columns import ColumnSamples
from loader.datasets.samples.fields import FieldSamples
from loader.datasets.samples.packed_rows import PackedRowSamples
from loader.datasets.samples.protocol import SampleReader
from loader.datasets.samples.records import RecordSamples
from loader.datasets.samples.sample_form import SampleForm, SampleSpec
from loader.datasets.samples.text_rows import TextRowSamples
from loader.datasets.targets import check_rows

ROW = "row"
"""The field of rows of text that are not decoded."""


def sample_reader(catalog: Catalog, spec: SampleSpec) -> SampleReader:
    """Return what makes samples of a catalog. Raises InvalidInput for fields that do not exist or cannot be decoded, and
    for samples that cannot have targets."""
    layout, decodes = catalog.layout, spec.decode in ("auto", "cuda")
    if spec.decode == "cuda" and isinstance(layout, Columns):
        raise InvalidInput(
            f"decode='cuda' is for image files in folders, tars and MDS; {catalog.uri} has columns"
        )
    is_text = isinstance(layout, Rows) and bool(layout.syntax)
    form = SampleForm(
        catalog, spec, [ROW] if is_text and not decodes else [field.name for field in catalog.fields]
    )
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
