"""Sums over the samples of batches: see `core/order/digests.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.digests import SampleSum, sum_of
from cachesvc.core.order.epoch_order import OrderSpec
from loader.batches.feed import Feed
from loader.datasets.mixture import Mixture
from loader.datasets.packing import Packed
from loader.datasets.wrapped import as_view
from loader.job.handed_over import HandedOver, Span
from loader.reading.opened_dataset import OpenedDataset
from loader.reading.reader import Ints


def has_digest(dataset: object) -> bool:
    """Tell whether samples of a dataset can be summed: those of a dataset of `open_dataset`, of a part of it, of packs, or
    of a mixture of such."""
    return isinstance(dataset, (Mixture, Packed)) or as_view(dataset) is not None


def known_before(handed: HandedOver) -> SampleSum:
    """The sum before this loader's own batches. Raises StateMismatch where a loaded state has none."""
    if handed.before is None:
        raise StateMismatch(
            "the state that this run continues has no digest: with several ranks, call digest() on all of them before "
            "state_dict()"
        )
    return handed.before


def known_digest(handed: HandedOver, dataset: object, world_size: int) -> str:
    """The digest that a state may name, in hex: of a single rank that knows the bytes of all that it handed over, and of
    several that have just called `digest()`; else ""."""
    if handed.before is None or not (world_size == 1 or handed.is_empty) or not has_digest(dataset):
        return ""
    try:
        return (handed.before + fold(handed, dataset, reads=False)).digest.hex()
    except _Unknown:
        return ""


def fold(handed: HandedOver, dataset: object, reads: bool = True) -> SampleSum:
    """The sum over all that this rank handed over since `handed.before`. With `reads`, extents whose bytes have no known
    digest are read. Raises InvalidInput for datasets without a sum, and what reading raises."""
    if not has_digest(dataset):
        raise InvalidInput(
            f"digest() sums samples of open_dataset, parts, packs and mixtures of them; those of {type(dataset).__name__} "
            "are made of several, or in a way of its own"
        )
    found = handed.own
    for span in handed.spans:
        for spec, indices in _chunks(span):
            found += _sum(span.feed.dataset, indices, spec, span.epoch, reads)
    handed.own, handed.spans = found, []
    return found


class _Unknown(Exception):
    """The bytes of some extent have no known digest."""


def _chunks(span: Span) -> Iterator[tuple[OrderSpec, Ints]]:
    feed: Feed = span.feed
    if span.instead is not None:
        return iter(((feed.spec_at(span.epoch, span.first), span.instead),))
    return feed.orders.taken(feed.share, span.epoch, span.first, span.last)


def _sum(dataset: object, indices: Ints, spec: OrderSpec, epoch: int, reads: bool) -> SampleSum:
    if isinstance(dataset, Mixture):
        return _sum_of_mixture(dataset, indices, spec, reads)
    if isinstance(dataset, Packed):
        return dataset.sum(indices, spec, epoch, partial(_contents, dataset.leaf.summed, reads))
    view = as_view(dataset)
    assert view is not None, "has_digest"
    return sum_of(view.ids_of(indices), view.catalog.extent_first, partial(_contents, view.summed, reads))


def _sum_of_mixture(mixture: Mixture, spots: Ints, spec: OrderSpec, reads: bool) -> SampleSum:
    component, _, inner = mixture.locate(spots)
    total = SampleSum()
    for number, part in enumerate(mixture.components):
        mine = component == number
        if isinstance(part, Packed):  # other packs in each epoch of their own
            for _, _, own, own_epoch, packs in mixture.groups(spots[mine], spec):
                total += _sum(part, packs, own, own_epoch, reads)
        else:
            total += _sum(part, inner[mine], spec, 0, reads)
    return total


def _contents(opened: OpenedDataset, reads: bool, extents: Ints) -> list[bytes]:
    if reads:
        opened.learn_contents(extents)
    elif opened.contents.unknown(extents).size:
        raise _Unknown
    return opened.contents.of(extents)
