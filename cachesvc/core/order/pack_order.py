"""The packs of a dataset's documents, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cachesvc.core.order.assignment import I64
from cachesvc.core.order.best_fit import WholePackRun, WholePacks
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from cachesvc.core.order.packing import PackRun
from cachesvc.core.order.recent import Latest
from cachesvc.core.order.run import component_spec

_RUNS_KEPT = 4


@dataclass(frozen=True, slots=True)
class Documents:
    """One-dimensional integer arrays in the order of their addresses. `extent_first[i]` is the first document of
    extent i, `extent_tokens[i]` the number of tokens in it. `place_of` gives addresses of stored tokens, and the
    numbers of rows that are yet to be tokenised."""

    dtype: np.dtype[Any]
    extent_first: I64
    extent_tokens: I64
    place_of: Callable[[I64], I64]
    length_of: Callable[[I64], I64]

    @property
    def tokens(self) -> int:
        """Number of tokens of all documents."""
        return int(self.extent_tokens.sum())

    def reordered(self, order: I64) -> Documents:
        """Return the documents in another order, as one extent."""
        bounds, tokens = np.asarray([0, len(order)], np.int64), np.asarray([self.tokens], np.int64)
        return Documents(
            self.dtype,
            bounds,
            tokens,
            lambda documents: self.place_of(order[documents]),
            lambda documents: self.length_of(order[documents]),
        )


class StoredPieces(NamedTuple):
    """Pack `row[i]` of a request has the tokens from the address `begin[i]` to `end[i]`, in this order. int64[n] each."""

    row: I64
    begin: I64
    end: I64


class PackOrder:
    """Packs of `length` tokens in each epoch. `ids`: the documents' numbers in the dataset, in the sequence of a part's
    indices; None where they ascend. `whole`: the packs of whole documents; None where documents are laid end to end."""

    def __init__(self, documents: Documents, ids: I64 | None, length: int, whole: WholePacks | None) -> None:
        self.documents, self.length, self.whole = documents, length, whole
        self.index_of = None if ids is None else np.argsort(ids, kind="stable")
        """The index of each document in the dataset; None where it is the document's number."""
        self._in_order = documents
        if ids is not None and self.index_of is not None and whole is None and (ids[1:] < ids[:-1]).any():
            self._in_order = documents.reordered(np.argsort(self.index_of))
        self._runs: Latest[tuple[OrderSpec, int], PackRun | WholePackRun] = Latest(_RUNS_KEPT)

    @property
    def size(self) -> int:
        """The packs of an epoch."""
        return self.whole.size if self.whole is not None else self.documents.tokens // self.length

    def documents_in(self, spec: OrderSpec) -> Documents:
        """Return the documents as an order has them: an unshuffled one in the sequence of the dataset."""
        return self.documents if spec.shuffle else self._in_order

    def run(self, spec: OrderSpec, epoch: int) -> PackRun | WholePackRun:
        """Return the order of an epoch's packs."""
        return self._runs.get((component_spec(spec), epoch), self._run)

    def stored(self, spots: I64, spec: OrderSpec, epoch: int) -> StoredPieces:
        """Return where the tokens of packs are stored."""
        pieces, width = self.run(spec, epoch).pieces(spots), self.documents.dtype.itemsize
        places = self.documents_in(spec).place_of(pieces.document)
        return StoredPieces(pieces.row, places + pieces.begin * width, places + pieces.end * width)

    def _run(self, key: tuple[OrderSpec, int]) -> PackRun | WholePackRun:
        spec, epoch = key
        documents = self.documents_in(spec)
        if self.whole is not None:
            order = EpochOrder(spec, self.whole.extent_first, epoch)
            return WholePackRun(self.whole, order, documents.length_of)
        order = EpochOrder(spec, documents.extent_first, epoch)
        extents_known = documents is self.documents
        return PackRun(order, documents.length_of, documents.extent_tokens, self.length, extents_known)
