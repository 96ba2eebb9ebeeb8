"""The data of a run that is made of datasets: packs of one, or a mixture. See `run_data.py`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.catalog.sample_places import NamedSample
from cachesvc.core.order.best_fit import whole_packs
from cachesvc.core.order.digests import SampleSum
from cachesvc.core.order.epoch_order import OrderSpec
from cachesvc.core.order.mixture import MixtureRun, groups_of, own_spec, split_spots
from cachesvc.core.order.mixture_weights import EpochDraws, EpochWeights, StepWeights
from cachesvc.core.order.pack_order import PackOrder
from cachesvc.core.order.permute import Mask
from cachesvc.core.order.recent import Latest
from cachesvc.core.order.run import Run, RunOrder
from cachesvc.saved_runs.data import PackSource, digest_of_mixture, identity_of_packs
from cachesvc.saved_runs.documents import documents_in_state
from cachesvc.saved_runs.run_data import Chosen, ContentsIn, Leaf, Matching
from cachesvc.saved_runs.stored_packs import StoredPacks

_EPOCHS_KEPT = 8


class Packs:
    """Packs of a dataset's documents. `counts`: the folder that keeps what reading the data gave. Raises NotFound where the
    documents are not known, and what finding them raises."""

    changes: tuple[int, ...] = ()
    may_change = False

    def __init__(self, source: PackSource, leaf: Leaf, counts: str | None) -> None:
        documents, self._counts, rows = documents_in_state(source, leaf.catalog, leaf.ids, counts)
        whole = None
        if source.overflow:
            lengths = documents.length_of(np.arange(int(documents.extent_first[-1])))
            whole = whole_packs(documents.extent_first, lengths, source.length, source.overflow)  # type: ignore[arg-type]
        self._source, self._leaf, self.leaves = source, leaf, (leaf,)
        self._order = PackOrder(documents, leaf.ids, source.length, whole)
        self._stored = StoredPacks(leaf.catalog, self._order, rows)

    @property
    def identity(self) -> str:
        """See `Leaf`."""
        given, dtype = self._source, self._order.documents.dtype
        return identity_of_packs(self._leaf.identity, given.length, dtype, self._counts, given.overflow)

    def order(self, spec: OrderSpec, epoch: int) -> RunOrder:
        """See `Leaf`."""
        return RunOrder(spec, self.run(spec, epoch), epoch)

    def run(self, spec: OrderSpec, epoch: int) -> Run:
        """See `Leaf`."""
        return self._order.run(spec, epoch)

    def size(self, spec: OrderSpec, epoch: int) -> int:
        """See `Leaf`."""
        return self._order.size

    def left_out(self, indices: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """See `Leaf`: packs of which nothing is left."""
        return self._order.left_out(indices, spec, epoch)

    def named(self, indices: Ints, spec: OrderSpec, epoch: int) -> list[NamedSample]:
        """See `Leaf`."""
        return self._stored.named(indices, spec, epoch)

    def sum(self, indices: Ints, spec: OrderSpec, epoch: int, contents_of: ContentsIn) -> SampleSum:
        """See `Leaf`."""
        return self._stored.sum(indices, spec, epoch, partial(contents_of, self._leaf))

    def extents(self, indices: Ints, spec: OrderSpec, epoch: int) -> Iterator[Chosen]:
        """See `Leaf`."""
        yield Chosen(0, self._stored.extents(indices, spec, epoch))

    def matching(self, key: str) -> Matching | None:
        """See `Leaf`. A pack matches that has a token of the document, or of the sample."""
        numbers = self._stored.keys.with_key(key)
        if numbers.size:
            return partial(self._stored.with_documents, numbers)
        wanted = self._leaf.ids_of(self._leaf.with_key(key))
        return partial(self._stored.having, wanted) if wanted.size else None


class Mixed:
    """A mixture of datasets and packs."""

    may_change = True

    def __init__(self, parts: Sequence[Leaf | Packs], weights: EpochWeights | StepWeights) -> None:
        self._parts, self._weights = parts, weights
        self.leaves = tuple(leaf for part in parts for leaf in part.leaves)
        self._sizes = sizes_of(parts)
        self._epochs: Latest[tuple[OrderSpec, int], EpochDraws] = Latest(_EPOCHS_KEPT)

    @property
    def identity(self) -> str:
        """See `Leaf`: up to the weights."""
        return digest_of_mixture(self._weights, [part.identity for part in self._parts])

    @property
    def changes(self) -> tuple[int, ...]:
        """The epochs from which epochs may have another length."""
        return self._weights.length_changes

    def order(self, spec: OrderSpec, epoch: int) -> RunOrder:
        """See `Leaf`."""
        in_time_order = isinstance(self._weights, StepWeights)
        return RunOrder(spec, self.run(spec, epoch), epoch, in_time_order=in_time_order)

    def run(self, spec: OrderSpec, epoch: int) -> MixtureRun:
        """See `Leaf`."""
        draws, slots, taken = self._epoch(spec, epoch)

        def run_of(index: int, own_epoch: int) -> Run:
            return self._parts[index].run(own_spec(spec, index, len(self._parts)), own_epoch)

        return MixtureRun(draws, slots, self._sizes, taken, run_of)

    def size(self, spec: OrderSpec, epoch: int) -> int:
        """See `Leaf`."""
        return self._epoch(spec, epoch).slots

    def left_out(self, indices: Ints, spec: OrderSpec, epoch: int) -> Mask:
        """See `Leaf`."""
        mask = np.zeros(indices.size, np.bool_)
        for rows, index, own, own_epoch, inner in groups_of(self._sizes, indices, spec):
            mask[rows] = self._parts[index].left_out(inner, own, own_epoch)
        return mask

    def named(self, indices: Ints, spec: OrderSpec, epoch: int) -> list[NamedSample]:
        """See `Leaf`."""
        found: dict[int, NamedSample] = {}
        for rows, index, own, own_epoch, inner in groups_of(self._sizes, indices, spec):
            found.update(zip(rows.tolist(), self._parts[index].named(inner, own, own_epoch), strict=True))
        return [found[row] for row in range(indices.size)]

    def sum(self, indices: Ints, spec: OrderSpec, epoch: int, contents_of: ContentsIn) -> SampleSum:
        """See `Leaf`."""
        component, _, inner = split_spots(self._sizes, indices)
        total = SampleSum()
        for index, part in enumerate(self._parts):
            mine = component == index
            if isinstance(part, Leaf):
                total += part.sum(inner[mine], spec, epoch, contents_of)
                continue
            for _, _, own, own_epoch, packs in groups_of(self._sizes, indices[mine], spec):
                total += part.sum(packs, own, own_epoch, contents_of)
        return total

    def extents(self, indices: Ints, spec: OrderSpec, epoch: int) -> Iterator[Chosen]:
        """See `Leaf`."""
        for _, index, own, own_epoch, inner in groups_of(self._sizes, indices, spec):
            for _, extents in self._parts[index].extents(inner, own, own_epoch):
                yield Chosen(index, extents)

    def matching(self, key: str) -> Matching | None:
        """See `Leaf`."""
        parts = [part.matching(key) for part in self._parts]

        def found(indices: Ints, spec: OrderSpec, epoch: int) -> Mask:
            mask = np.zeros(indices.size, np.bool_)
            for rows, index, own, own_epoch, inner in groups_of(self._sizes, indices, spec):
                match = parts[index]
                if match is not None:
                    mask[rows] = match(inner, own, own_epoch)
            return mask

        return found if any(parts) else None

    def _epoch(self, spec: OrderSpec, epoch: int) -> EpochDraws:
        return self._epochs.get((spec, epoch), lambda key: self._weights.epoch(*key))


RunData = Leaf | Packs | Mixed


def sizes_of(parts: Sequence[Leaf | Packs]) -> tuple[int, ...]:
    """The samples of each component in an epoch of its own."""
    any_order = OrderSpec(seed=0, global_batch=1)
    return tuple(part.size(any_order, 0) for part in parts)
