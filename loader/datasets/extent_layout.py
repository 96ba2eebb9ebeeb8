"""Maps the samples of a dataset to extents, also through Subset, ConcatDataset, StackDataset and users' own
datasets, and records to their slots, for a device that gathers them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import StackDataset, Subset

from cachesvc.catalog.layout import Fixed
from cachesvc.core.arguments import places_of
from cachesvc.core.order.epoch_order import EpochOrder, Plan
from loader.datasets.components import view_layout
from loader.datasets.dataset import Dataset
from loader.datasets.samples.kinds import gathered_records
from loader.datasets.samples.records import RecordForm
from loader.datasets.wrapped import MAX_DEPTH, as_view, parts_of
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


def extent_layout(dataset: Any, shuffle: bool, depth: int = MAX_DEPTH) -> ExtentLayout:
    """Return the layout of a dataset. If nothing is known, all samples count as one extent. Raises IndexError for a
    Subset with an index out of range."""
    view, count = as_view(dataset), len(dataset)
    if isinstance(dataset, Dataset) and Dataset.__len__(dataset) == count:
        view = dataset
    if view is not None:
        layout = view_layout(view, shuffle)
        parts = (LayoutPart(view.opened, layout.extent_first),) if layout.extents_known else ()
        return ExtentLayout(layout.extent_first, layout.index_of, parts)
    found = _layout_of_outer(dataset, shuffle, depth - 1) if depth else None
    if found is None or int(found.extent_first[-1]) != count:
        return ExtentLayout(np.asarray([0, count], np.int64), None, ())
    return found


def _layout_of_outer(dataset: Any, shuffle: bool, depth: int) -> ExtentLayout | None:
    """Return the layout of a dataset around others. A user's dataset with as many samples as the dataset it holds
    is assumed to use the same indices."""
    parts = parts_of(dataset)
    if parts is not None:
        found = [extent_layout(part, shuffle, depth) for part in parts]
        return _stacked(found) if isinstance(dataset, StackDataset) else _concatenated(found)
    inner = getattr(dataset, "dataset", None)
    if not hasattr(inner, "__len__"):
        return None
    inner_layout = extent_layout(inner, shuffle, depth)
    if not inner_layout.parts:  # perhaps another library's dataset, with indices of any kind
        return None
    return _subset(inner_layout, dataset.indices, shuffle) if type(dataset) is Subset else inner_layout


def _concatenated(parts: list[ExtentLayout]) -> ExtentLayout:
    starts = np.cumsum([0, *(part.extent_first[-1] for part in parts)]).tolist()
    shifted = [
        (part, start, tuple(LayoutPart(each.opened, each.first + start) for each in part.parts))
        for part, start in zip(parts, starts, strict=False)
    ]
    firsts = [part.extent_first[1:] + start for part, start, _ in shifted]
    index_of = None
    if any(part.index_of is not None for part in parts):
        index_of = np.concatenate([_indices(part) + start for part, start, _ in shifted])
    parts_of_all = tuple(piece for _, _, each in shifted for piece in each)
    return ExtentLayout(np.concatenate([np.zeros(1, np.int64), *firsts]), index_of, parts_of_all)


def _stacked(parts: list[ExtentLayout]) -> ExtentLayout:
    """Take the order of the part with the most extents. Other parts are read ahead if their own order is the same."""
    with_parts = [part for part in parts if part.parts]
    leading = max(with_parts or parts, key=lambda part: len(part.extent_first))
    in_order = [part for part in parts if part is leading or _same_order(part.index_of, leading.index_of)]
    return leading._replace(parts=tuple(piece for part in in_order for piece in part.parts))


def _same_order(one: Ints | None, other: Ints | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _subset(inner_layout: ExtentLayout, indices: Any, shuffle: bool) -> ExtentLayout | None:
    """Return the layout of a Subset's samples within its inner dataset."""
    places = places_of(indices, int(inner_layout.extent_first[-1]), "sample")
    if inner_layout.index_of is not None:
        ordinal = np.empty_like(inner_layout.index_of)
        ordinal[inner_layout.index_of] = np.arange(len(ordinal))
        places = ordinal[places]
    index_of = None
    if (places[1:] < places[:-1]).any():
        if not shuffle:
            return None
        index_of = np.argsort(places, kind="stable")
        places = places[index_of]
    first, *others = (
        np.searchsorted(places, each).astype(np.int64)
        for each in (inner_layout.extent_first, *(piece.first for piece in inner_layout.parts))
    )
    parts = zip((piece.opened for piece in inner_layout.parts), others, strict=True)
    return ExtentLayout(first, index_of, tuple(LayoutPart(*each) for each in parts))


def _indices(part: ExtentLayout) -> Ints:
    return np.arange(part.extent_first[-1]) if part.index_of is None else part.index_of


def plans_for(
    layout: ExtentLayout, order: EpochOrder, low: int, high: int, batches: int
) -> list[tuple[OpenedDataset, Plan]]:
    """Plan when a rank with the slots [low, high) in `batches` micro-batches reads the extents of each part, in
    this epoch and the next."""
    after = EpochOrder(order.spec, layout.extent_first, order.epoch + 1).plan(low, high, batches)
    now = order.plan(low, high, batches)
    return [
        (
            part.opened,
            _plan_of_part(part, layout, now)._replace(following=_plan_of_part(part, layout, after).extent),
        )
        for part in layout.parts
    ]


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
