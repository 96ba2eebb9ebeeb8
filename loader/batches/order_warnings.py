"""Warnings of rank 0 at the beginning of a run: orders that mix less than their user may expect."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cachesvc.core.order.epoch_order import EpochOrder
from loader.batches.feed import Feed
from loader.datasets.wrapped import as_view
from loader.job.topology import Topology


def warnings_of(feed: Feed, topology: Topology) -> Iterator[str]:
    """Yield a line for each."""
    spec = feed.spec
    if spec.shuffle_scope == "node" and topology.world_size > 1 and not spec.by_node:
        yield (
            f"shuffle_scope='node' changes nothing: the {topology.world_size} ranks ({topology.source}) count as one node;"
            " torchrun, mpirun and srun say how many there are"
        )
    if spec.shuffle and (line := _sorted_labels(feed)):
        yield line


def _sorted_labels(feed: Feed) -> str:
    """A line about labels of which a window holds fewer than half as many as of data in random order; else ""."""
    view, layout, spec = as_view(feed.dataset), feed.layout, feed.spec
    labels = None if view is None else view.catalog.labels
    if view is None or labels is None or labels.ndim != 1 or labels.dtype.kind == "f" or not layout.parts:
        return ""
    order = feed.order(0)
    assert isinstance(order, EpochOrder), "that of a dataset"
    own = order.own_extents(0, 1)
    extents = np.flatnonzero(np.diff(layout.extent_first)) if own is None else own
    window = np.random.default_rng(0).permutation(extents)[: spec.window_extents or None]
    ranges = [np.arange(layout.extent_first[each], layout.extent_first[each + 1]) for each in window.tolist()]
    if not ranges:
        return ""
    ordinals = np.concatenate(ranges)
    found = labels[view.ids_of(feed.orders.indices_of(ordinals))]
    classes, seen = max(len(view.classes), int(found.max()) + 1), np.unique(found[found >= 0]).size
    if seen * 2 >= classes * (1 - (1 - 1 / max(1, classes)) ** found.size):
        return ""
    where = (
        f"the {len(window):,} extents of a window have"
        if spec.window_extents
        else "the extents of a node have"
    )
    return (
        f"samples are sorted by label: {where} {seen:,} of {classes:,} classes, and a node's part of a batch no more; "
        + ("give a larger window=, or window='all'" if spec.window_extents else "give shuffle_scope='job'")
        + ", or store the samples in random order once"
    )
