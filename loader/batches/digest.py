"""Sums over the samples of batches: see `core/order/digests.py`."""

from __future__ import annotations

from collections.abc import Iterator

from cachesvc.core.errors import InvalidInput, StateMismatch
from cachesvc.core.order.digests import SampleSum, sum_of
from loader.batches.feed import Feed
from loader.datasets.dataset import Dataset
from loader.datasets.mixture import Mixture
from loader.datasets.wrapped import as_view
from loader.job.handed_over import HandedOver, Span
from loader.reading.reader import Ints


def has_digest(dataset: object) -> bool:
    """Tell whether samples of a dataset can be summed: those of a dataset of `open_dataset`, of a part of it, or of a
    mixture of such, unless a daemon keeps them prepared."""
    parts = dataset.components if isinstance(dataset, Mixture) else (as_view(dataset),)
    return all(isinstance(part, Dataset) and part.preparing is None for part in parts)


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
            f"digest() sums samples of open_dataset as they are stored, and those of {type(dataset).__name__} are made of "
            "several, or were prepared by a function"
        )
    found = handed.own
    for span in handed.spans:
        for indices in _chunks(span):
            found += _sum(span.feed.dataset, indices, reads)
    handed.own, handed.spans = found, []
    return found


class _Unknown(Exception):
    """The bytes of some extent have no known digest."""


def _chunks(span: Span) -> Iterator[Ints]:
    feed: Feed = span.feed
    if span.instead is not None:
        return iter((span.instead,))
    return feed.orders.taken(feed.share, span.epoch, span.first, span.last)


def _sum(dataset: object, indices: Ints, reads: bool) -> SampleSum:
    view = as_view(dataset)
    if view is not None:
        return _sum_of_view(view, indices, reads)
    assert isinstance(dataset, Mixture), "has_digest"
    total = SampleSum()
    component, _, inner = dataset.locate(indices)
    for number, part in enumerate(dataset.components):
        assert isinstance(part, Dataset), "has_digest"
        total += _sum_of_view(part, inner[component == number], reads)
    return total


def _sum_of_view(view: Dataset, indices: Ints, reads: bool) -> SampleSum:
    opened = view.opened

    def contents_of(extents: Ints) -> list[bytes]:
        if reads:
            opened.learn_contents(extents)
        elif opened.contents.unknown(extents).size:
            raise _Unknown
        return opened.contents.of(extents)

    return sum_of(view.ids_of(indices), opened.catalog.extent_first, contents_of)
