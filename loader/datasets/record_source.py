"""Finds the places of an order's records, for a device that gathers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from cachesvc.catalog.layout import Fixed
from loader.datasets.dataset import Dataset
from loader.datasets.extent_layout import ExtentLayout
from loader.datasets.record_form import RecordForm
from loader.reading.reader import ExtentReader, Ints


@dataclass(frozen=True, slots=True)
class RecordSource:
    """Sample n of the order is the record in slot n + `run_shift[r]` of the reader, where r is the last with
    `run_first[r]` <= n.

    `extents_known`: the extents of the order are those of the reader. `ends_in` returns, for each extent, the extent in
    which the last record that begins there ends.
    """

    reader: Callable[[], ExtentReader]
    form: RecordForm
    run_first: Ints
    run_shift: Ints
    extents_known: bool
    ends_in: Callable[[ExtentReader], Ints]


def record_source(view: Dataset, order: ExtentLayout) -> RecordSource | None:
    """Return where the records of an order over a view lie; None where `SampleReader.record_form` is."""
    layout, form = view.catalog.layout, view.sample_reader.record_form
    if form is None or not isinstance(layout, Fixed):
        return None
    first, shift = layout.runs_first, layout.runs_slot - layout.runs_first
    ids = view.ids if order.index_of is None else view.ids_of(order.index_of)
    if ids is not None:
        shift = layout.slots(ids) - np.arange(len(ids))
        first = np.flatnonzero(np.diff(shift, prepend=shift[:1] - 1))
        shift = shift[first]

    def ends_in(reader: ExtentReader) -> Ints:
        extent_first = view.catalog.extent_first
        found = np.arange(len(extent_first) - 1)
        held = np.flatnonzero(np.diff(extent_first))
        found[held] = view.sample_reader.locate(reader, extent_first[held + 1] - 1)[2]
        return found

    return RecordSource(view.opened.reader, form, first, shift, bool(order.parts), ends_in)
