"""Maps the samples of a dataset to extents, and records to their slots, for a device that gathers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from cachesvc.catalog.layout import Fixed
from cachesvc.core.order.epoch_order import EpochOrder, Plan
from cachesvc.core.order.part_layout import part_layout
from loader.datasets.dataset import Dataset
from loader.datasets.samples.kinds import gathered_records
from loader.datasets.samples.records import RecordForm
from loader.reading.opened_dataset import OpenedDataset
from loader.reading.reader import ExtentReader, Ints


class LayoutPart(NamedTuple):
    """An opened dataset that is read. `first`: the first ordinal of each extent of its catalog, ascending,
    int64[E+1]."""

    opened: OpenedDataset
    first: Ints


class ExtentLayout(NamedTuple):
    """The extents of a dataset, over which its order is made.

    `extent_first`: the first ordinal of each extent. `index_of`: the index of each ordinal, None where they are
    equal. `parts`: the opened datasets that are read, () where extents are unknown. The extents of a ConcatDataset
    are those of its parts. The extents of a StackDataset are those of the part that has the most.
    """

    extent_first: Ints
    index_of: Ints | None
    parts: tuple[LayoutPart, ...]


def view_layout(dataset: Dataset, shuffle: bool) -> ExtentLayout:
    """Return where the samples of a view lie. Without shuffle, indices that do not ascend count as one extent."""
    first, index_of, extents_known = part_layout(dataset.catalog.extent_first, dataset.ids, shuffle)
    if not extents_known:
        return ExtentLayout(first, None, ())
    read_first = first
    if dataset.preparing is not None:  # the order is the source's, and other extents are read
        read_first = part_layout(dataset.opened.catalog.extent_first, dataset.ids, shuffle).extent_first
    return ExtentLayout(first, index_of, (LayoutPart(dataset.opened, read_first),))


def plans_for(
    layout: ExtentLayout, order: EpochOrder, low: int, high: int, batches: int
) -> list[tuple[OpenedDataset, Plan]]:
    """Plan when a rank with the slots [low, high) in `batches` micro-batches reads the extents of each part, in
    this epoch and the next."""
    after = EpochOrder(order.spec, layout.extent_first, order.epoch + 1).plan(low, high, batches).extent
    now, own = order.plan(low, high, batches), order.own_extents(low, high)
    if own is not None:
        after = np.concatenate((after, np.setdiff1d(own, after)))
    return [
        (
            part.opened,
            _plan_of_part(part, layout, now)._replace(
                following=extents_of_part(part, layout, after), local=own is not None
            ),
        )
        for part in layout.parts
    ]


def read_plan(dataset: Dataset, plan: Plan) -> Plan:
    """Convert a plan of a dataset's extents to the extents that are read, which differ where its samples are prepared."""
    if dataset.preparing is None:
        return plan
    layout = ExtentLayout(dataset.catalog.extent_first, None, ())
    part = LayoutPart(dataset.opened, dataset.opened.catalog.extent_first)
    read, following = _plan_of_part(part, layout, plan), plan.following
    if following is not None:
        following = extents_of_part(part, layout, following)
    return read._replace(following=following)


def _plan_of_part(part: LayoutPart, layout: ExtentLayout, plan: Plan) -> Plan:
    """Convert the plan to a part's own extents: those with the same ordinals."""
    if part.first is layout.extent_first:
        return plan
    begin, end = layout.extent_first[plan.extent], layout.extent_first[plan.extent + 1]
    begin, end = np.maximum(begin, part.first[0]), np.minimum(end, part.first[-1])
    low = np.searchsorted(part.first, begin, side="right") - 1
    counts = np.where(begin < end, np.searchsorted(part.first, end, side="left") - low, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    extent = low[rows] + np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    return _without_duplicates(Plan(extent, plan.first_step[rows], plan.last_step[rows]))


def extents_of_part(part: LayoutPart, layout: ExtentLayout, extents: Ints) -> Ints:
    """Convert extents, in their order, to a part's own."""
    steps = np.arange(len(extents))
    return _plan_of_part(part, layout, Plan(extents, steps, steps)).extent


def _without_duplicates(plan: Plan) -> Plan:
    """Drop duplicate rows, which occur where one extent overlaps several of the leading part."""
    order = np.lexsort((plan.extent, plan.last_step, plan.first_step))
    extent, first_step, last_step = (column[order] for column in plan[:3])
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(extent) != 0) | (np.diff(first_step) != 0) | (np.diff(last_step) != 0)
    return Plan(extent[new], first_step[new], last_step[new])


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
    """Return where the records of an order over a view lie; None where batches need Python or a check of values."""
    layout, records = view.catalog.layout, gathered_records(view.sample_reader)
    form = None if records is None else records.record_form
    if records is None or form is None or not isinstance(layout, Fixed):
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
        found[held] = records.locate(reader, extent_first[held + 1] - 1)[2]
        return found

    return RecordSource(view.opened.reader, form, first, shift, bool(order.parts), ends_in)
