"""Packs over a catalog: where their tokens are stored, and the sum over them in a run's digest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.layout import Columns, Indirect
from cachesvc.catalog.sample_places import NamedSample, address_places, grouped, places_of
from cachesvc.core.order.digests import ContentsOf, SampleSum, sum_of_parts
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.intervals import Intervals
from cachesvc.core.order.pack_order import PackOrder
from cachesvc.core.order.permute import Mask
from cachesvc.saved_runs.document_keys import DocumentKeys

_AT_ONCE = 1 << 12
"""Packs whose parts are computed at once for a sum."""


class StoredPacks:
    """The packs of an order over a catalog. `rows`: the catalog's sample of each row, where rows are tokenised as they are
    read; None where tokens are stored."""

    def __init__(self, catalog: Catalog, order: PackOrder, rows: Ints | None) -> None:
        self._catalog, self._order, self._rows = catalog, order, rows
        self._extents = Intervals(catalog.extent_starts)
        self.keys = DocumentKeys(catalog, order.documents, order.ids)

    def named(self, packs: Ints, spec: OrderSpec, epoch: int) -> list[NamedSample]:
        """Return the documents of each pack, and where its tokens are stored: a place for each piece of a document, and the
        whole row where rows are tokenised."""
        pieces = self._order.pieces(packs, spec, epoch)
        numbers = self._order.numbers(pieces.document, spec)
        documents = grouped(pieces.row, [(self.keys.key(number),) for number in numbers.tolist()], len(packs))
        if self._rows is None:
            stored = self._order.stored(packs, spec, epoch)
            places = address_places(self._catalog, stored.begin, stored.end)
        else:
            places = places_of(self._catalog, self._parts_of_rows(packs, spec, epoch)[1])
        each = grouped(pieces.row, places, len(packs))
        return [NamedSample("", *pair) for pair in zip(each, documents, strict=True)]

    def extents(self, packs: Ints, spec: OrderSpec, epoch: int) -> Ints:
        """Return the extents that hold bytes of packs, ascending."""
        if self._rows is not None:
            return extents_of(self._catalog, np.unique(self._parts_of_rows(packs, spec, epoch)[1]))
        _, begin, end = self._order.stored(packs, spec, epoch)
        return _extents_between(self._catalog, begin, end)

    def with_documents(self, numbers: Ints, packs: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """Tell which packs have a part of some documents, by their indices in the dataset: bool[packs]."""
        found, pieces = np.zeros(packs.size, np.bool_), self._order.pieces(packs, spec, epoch)
        found[pieces.row[np.isin(self._order.numbers(pieces.document, spec), numbers)]] = True
        return found

    def having(self, samples: Ints, packs: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """Tell which packs have a token of some of the catalog's samples: bool[packs]."""
        found = np.zeros(packs.size, np.bool_)
        if self._rows is not None:
            row, held, _, _ = self._parts_of_rows(packs, spec, epoch)
            found[row[np.isin(held, samples)]] = True
            return found
        stored = self._order.stored(packs, spec, epoch)
        addresses, lengths = (each.reshape(-1) for each in self._catalog.locate(samples))
        for low, high in zip(addresses.tolist(), (addresses + lengths).tolist(), strict=True):
            found[stored.row[(stored.begin < high) & (stored.end > low)]] = True
        return found

    def sum(self, packs: Ints, spec: OrderSpec, epoch: int, contents_of: ContentsOf) -> SampleSum:
        """Return the sum over the parts of packs: the bytes of documents in each extent, or the tokens of rows."""
        total, ascending = SampleSum(), np.sort(packs)  # packs that lie side by side share documents
        for start in range(0, packs.size, _AT_ONCE):
            some = ascending[start : start + _AT_ONCE]
            if self._rows is None:
                _, begin, end = self._order.stored(some, spec, epoch)
                extents, *parts = _cut(self._extents, begin, end)
            else:
                _, *parts = self._parts_of_rows(some, spec, epoch)
                extents = np.searchsorted(self._catalog.extent_first, parts[0], "right") - 1
            total += sum_of_parts(extents, parts, contents_of)
        return total

    def _parts_of_rows(self, packs: Ints, spec: OrderSpec, epoch: int) -> tuple[Ints, Ints, Ints, Ints]:
        """The parts of tokenised rows in packs: the pack's place among `packs`, the sample, its first token and its end."""
        assert self._rows is not None, "there are rows"
        pieces = self._order.pieces(packs, spec, epoch)
        rows = self._order.documents_in(spec).place_of(pieces.document)
        return pieces.row, self._rows[rows], pieces.begin, pieces.end


def extents_of(catalog: Catalog, samples: Ints) -> Ints:
    """The extents of samples, ascending, with those into which samples continue."""
    begin = np.searchsorted(catalog.extent_first, samples, side="right") - 1
    if isinstance(catalog.layout, (Columns, Indirect)) or not samples.size:
        return np.unique(begin)
    addresses, lengths = catalog.locate(samples)
    held = lengths > 0
    low, high = addresses[held], addresses[held] + lengths[held]
    return np.unique(np.concatenate([begin, _extents_between(catalog, low, high)]))


def _extents_between(catalog: Catalog, begin: Ints, end: Ints) -> Ints:
    """The extents with bytes of the ranges [begin[i], end[i]), none of them empty, of the address space, ascending."""
    return np.unique(_cut(Intervals(catalog.extent_starts), begin, end)[0])


def _cut(extents: Intervals, begin: Ints, end: Ints) -> Sequence[Ints]:
    """Cut the ranges [begin[i], end[i]), none of them empty, where extents begin. Return extents, begins and ends, in any
    sequence."""
    extent = extents.of(begin)
    stop = extents.end_of(extent)
    long = np.flatnonzero(end > stop)
    if not long.size:
        return extent, begin, end
    parts, rests = (extent, begin, np.minimum(end, stop)), _cut(extents, stop[long], end[long])
    return [np.concatenate(each) for each in zip(parts, rests, strict=True)]
