"""The packs of a dataset's documents, epoch after epoch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from cachesvc.core.order.assignment import I64
from cachesvc.core.order.best_fit import WholePackRun, WholePacks
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from cachesvc.core.order.excluded import parse_excluded
from cachesvc.core.order.packing import PackRun, Pieces
from cachesvc.core.order.permute import Mask
from cachesvc.core.order.recent import Latest
from cachesvc.core.order.run import component_spec

_RUNS_KEPT = 4


@dataclass(frozen=True, slots=True)
class Documents:
    """One-dimensional integer arrays in the order of their addresses. `extent_first[i]` is the first document of
    extent i, `extent_tokens[i]` the number of tokens in it. `place_of` gives addresses of stored tokens, and the
    numbers of rows that are yet to be tokenised. `of_files`: they are parts of files, and no samples of the dataset."""

    dtype: np.dtype[Any]
    extent_first: I64
    extent_tokens: I64
    place_of: Callable[[I64], I64]
    length_of: Callable[[I64], I64]
    of_files: bool = False

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
        self.documents, self.ids, self.length, self.whole = documents, ids, length, whole
        self.index_of = None if ids is None else np.argsort(ids, kind="stable")
        """The index of each document in the dataset; None where it is the document's number."""
        self._in_order = documents
        if ids is not None and self.index_of is not None and whole is None and (ids[1:] < ids[:-1]).any():
            self._in_order = documents.reordered(np.argsort(self.index_of))
        self._left_out: Latest[tuple[str, bool], I64] = Latest(_RUNS_KEPT)
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

    def numbers(self, documents: I64, spec: OrderSpec) -> I64:
        """Return the indices in the dataset of documents of an order."""
        in_order = self.documents_in(spec) is not self.documents
        return documents if in_order or self.index_of is None else self.index_of[documents]

    def pieces(self, packs: I64, spec: OrderSpec, epoch: int) -> Pieces:
        """Return the pieces of documents that packs consist of, without those that the spec excludes."""
        found, left_out = self.run(spec, epoch).pieces(packs), self._excluded(spec)
        if not left_out.size:
            return found
        kept = ~np.isin(found.document, left_out)
        return Pieces(*(column[kept] for column in found))

    def left_out(self, packs: I64, spec: OrderSpec, epoch: int) -> Mask:
        """Tell packs all of whose documents are excluded."""
        found, left_out = np.zeros(packs.size, np.bool_), self._excluded(spec)
        if left_out.size:
            rows = self.run(spec, epoch).doubtful(packs, left_out)
            found[rows] = True
            found[rows[self.pieces(packs[rows], spec, epoch).row]] = False
        return found

    def stored(self, spots: I64, spec: OrderSpec, epoch: int) -> StoredPieces:
        """Return where the tokens of packs are stored."""
        pieces, width = self.pieces(spots, spec, epoch), self.documents.dtype.itemsize
        places = self.documents_in(spec).place_of(pieces.document)
        return StoredPieces(pieces.row, places + pieces.begin * width, places + pieces.end * width)

    def _excluded(self, spec: OrderSpec) -> I64:
        """Return the documents of an order that are excluded, ascending."""
        if not spec.excluded:
            return np.empty(0, np.int64)
        in_order = self.documents_in(spec) is not self.documents
        return self._left_out.get((spec.excluded, in_order), self._excluded_in)

    def _excluded_in(self, key: tuple[str, bool]) -> I64:
        known = parse_excluded(key[0]).samples
        numbers: I64 = known[known < self.documents.extent_first[-1]]
        if key[1] or self.index_of is None:
            return numbers
        found: I64 = np.flatnonzero(np.isin(self.index_of, numbers))
        return found

    def _run(self, key: tuple[OrderSpec, int]) -> PackRun | WholePackRun:
        spec, epoch = key
        documents = self.documents_in(spec)
        if self.whole is not None:
            order = EpochOrder(spec, self.whole.extent_first, epoch)
            return WholePackRun(self.whole, order, documents.length_of)
        order = EpochOrder(spec, documents.extent_first, epoch)
        extents_known = documents is self.documents
        return PackRun(order, documents.length_of, documents.extent_tokens, self.length, extents_known)
