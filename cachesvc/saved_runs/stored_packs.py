"""Packs over a catalog: where their tokens are stored, and the sum over them in a run's digest."""

from __future__ import annotations

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.catalog.sample_places import NamedSample, address_places, grouped, places_of
from cachesvc.core.order.digests import ContentsOf, SampleSum, sum_of_parts
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.intervals import Intervals
from cachesvc.core.order.pack_order import PackOrder
from cachesvc.core.order.permute import Mask
from cachesvc.saved_runs.document_keys import DocumentKeys
from cachesvc.saved_runs.extents import cut, extents_between, extents_of

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
        return extents_between(self._catalog, begin, end)

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
                extents, *parts = cut(self._extents, begin, end)
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
