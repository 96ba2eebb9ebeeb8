"""How the samples of a dataset lie in extents, whatever is around it: Subset, ConcatDataset, StackDataset, a user's own."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from torch.utils.data import StackDataset, Subset

from cachesvc.core.arguments import places_of
from cachesvc.core.order.epoch_order import EpochOrder, Plan
from loader.datasets.composite import spread_of
from loader.datasets.wrapped import MAX_DEPTH, flattened, parts_of
from loader.reading.opened_dataset import OpenedDataset
from loader.reading.reader import Ints


class Piece(NamedTuple):
    """A dataset that is read: the first ordinal of each extent of its catalog, ascending, int64[E+1]."""

    opened: OpenedDataset
    first: Ints


class Laid(NamedTuple):
    """What an order is made over, the first ordinal of each extent; the index of each ordinal (None: the same); and what
    is read for it. An extent of a ConcatDataset is one of a part's; of a StackDataset, one of that part's which has the
    most: of what is small beside it all may lie in one. `pieces`: none where nothing is known of extents."""

    extent_first: Ints
    arrange: Ints | None
    pieces: tuple[Piece, ...]


def laid(dataset: Any, shuffle: bool, depth: int = MAX_DEPTH) -> Laid:
    """Raises IndexError for a Subset of samples that are not there. Where nothing is known, all counts as one extent."""
    view, count = flattened(dataset), len(dataset)
    if view is not None:
        spread = spread_of(view, shuffle)
        pieces = (Piece(view.opened, spread.extent_first),) if spread.planned else ()
        return Laid(spread.extent_first, spread.arrange, pieces)
    found = _around(dataset, shuffle, depth - 1) if depth else None
    if found is None or int(found.extent_first[-1]) != count:
        return Laid(np.asarray([0, count], np.int64), None, ())
    return found


def _around(dataset: Any, shuffle: bool, depth: int) -> Laid | None:
    """Of what is around others. A user's own of as many samples as what it holds is taken to index that alike."""
    parts = parts_of(dataset)
    if parts is not None:
        found = [laid(part, shuffle, depth) for part in parts]
        return _side_by_side(found) if isinstance(dataset, StackDataset) else _one_behind_the_other(found)
    inner = getattr(dataset, "dataset", None)
    if not hasattr(inner, "__len__"):
        return None
    held = laid(inner, shuffle, depth)
    if not held.pieces:  # perhaps no dataset of ours, and indices of any kind
        return None
    return _chosen(held, dataset.indices, shuffle) if type(dataset) is Subset else held


def _one_behind_the_other(parts: list[Laid]) -> Laid:
    starts = np.cumsum([0, *(part.extent_first[-1] for part in parts)]).tolist()
    moved = [
        (part, start, tuple(Piece(each.opened, each.first + start) for each in part.pieces))
        for part, start in zip(parts, starts, strict=False)
    ]
    firsts = [part.extent_first[1:] + start for part, start, _ in moved]
    arrange = None
    if any(part.arrange is not None for part in parts):
        arrange = np.concatenate([_indices(part) + start for part, start, _ in moved])
    pieces = tuple(piece for _, _, each in moved for piece in each)
    return Laid(np.concatenate([np.zeros(1, np.int64), *firsts]), arrange, pieces)


def _side_by_side(parts: list[Laid]) -> Laid:
    """Those parts that the leading one's order takes through their own are looked ahead for."""
    known = [part for part in parts if part.pieces]
    leading = max(known or parts, key=lambda part: len(part.extent_first))
    alike = [part for part in parts if part is leading or _alike(part.arrange, leading.arrange)]
    return leading._replace(pieces=tuple(piece for part in alike for piece in part.pieces))


def _alike(one: Ints | None, other: Ints | None) -> bool:
    return one is other or (one is not None and other is not None and np.array_equal(one, other))


def _chosen(held: Laid, indices: Any, shuffle: bool) -> Laid | None:
    """Those of a Subset, as they lie in what it is of."""
    places = places_of(indices, int(held.extent_first[-1]), "sample")
    if held.arrange is not None:
        ordinal = np.empty_like(held.arrange)
        ordinal[held.arrange] = np.arange(len(ordinal))
        places = ordinal[places]
    arrange = None
    if (places[1:] < places[:-1]).any():
        if not shuffle:
            return None
        arrange = np.argsort(places, kind="stable")
        places = places[arrange]
    first, *others = (
        np.searchsorted(places, each).astype(np.int64)
        for each in (held.extent_first, *(piece.first for piece in held.pieces))
    )
    pieces = zip((piece.opened for piece in held.pieces), others, strict=True)
    return Laid(first, arrange, tuple(Piece(*each) for each in pieces))


def _indices(part: Laid) -> Ints:
    return np.arange(part.extent_first[-1]) if part.arrange is None else part.arrange


def plans_for(
    found: Laid, order: EpochOrder, low: int, high: int, batches: int
) -> list[tuple[OpenedDataset, Plan]]:
    """When a rank with the slots [low, high) in `batches` micro-batches reads the extents of each piece, and those of the
    epoch after this one."""
    after = EpochOrder(order.spec, found.extent_first, order.epoch + 1).plan(low, high, batches)
    now = order.plan(low, high, batches)
    return [
        (piece.opened, _of(piece, found, now)._replace(following=_of(piece, found, after).extent))
        for piece in found.pieces
    ]


def _of(piece: Piece, found: Laid, plan: Plan) -> Plan:
    """The plan over a piece's own extents: those that hold the same ordinals."""
    if piece.first is found.extent_first:
        return plan
    begin, end = found.extent_first[plan.extent], found.extent_first[plan.extent + 1]
    begin, end = np.maximum(begin, piece.first[0]), np.minimum(end, piece.first[-1])
    low = np.searchsorted(piece.first, begin, side="right") - 1
    counts = np.where(begin < end, np.searchsorted(piece.first, end, side="left") - low, 0)
    rows = np.repeat(np.arange(len(counts)), counts)
    extent = low[rows] + np.arange(len(rows)) - (np.cumsum(counts) - counts)[rows]
    return _each_once(Plan(extent, plan.first_step[rows], plan.last_step[rows]))


def _each_once(plan: Plan) -> Plan:
    """Without what is said twice: an extent that lies beside several."""
    order = np.lexsort((plan.extent, plan.last_step, plan.first_step))
    extent, first_step, last_step = (column[order] for column in plan[:3])
    new = np.ones(len(order), np.bool_)
    new[1:] = (np.diff(extent) != 0) | (np.diff(first_step) != 0) | (np.diff(last_step) != 0)
    return Plan(extent[new], first_step[new], last_step[new])
