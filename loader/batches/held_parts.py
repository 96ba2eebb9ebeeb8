"""Lets the nodes of a job take the parts of the data that they hold, where an order gives each node one part for the run.

A launcher may number the hosts anew at each start. Each process looks which parts its node holds some extents of, and
process 0 gives each node the part that it holds most of. So ranks change places in the global batches, which stay equal as
sets.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise

import numpy as np

from cachesvc.core.errors import CacheError
from cachesvc.core.limits import AGREE_S
from cachesvc.core.order.epoch_order import EpochOrder, OrderSpec
from loader.batches.feed import Feed
from loader.datasets.extent_layout import extents_of_part
from loader.job.store import JobStore, awaited
from loader.job.topology import Topology
from loader.reading.reader import Ints

PROBED = 16
"""Extents of each part that are looked for."""


def claim(topology: Topology, feed: Feed, store: JobStore) -> int:
    """Return the rank whose part of global batches this rank reads. All processes of the job call it at the same place.
    Raises DeadlineExceeded where one of them does not."""
    parts = parts_of(feed.spec, topology.world_size)
    if parts < 2:
        return topology.rank
    store.put(str(topology.process), [topology.rank, _held(feed, parts)])
    each = topology.world_size // parts
    if topology.process == 0:
        reports: dict[int, list[int]] = {}
        for process in range(topology.processes):
            rank, held = awaited(store, str(process), AGREE_S, f"what process {process} holds")
            reports.setdefault(rank, held)
        store.put("taken", taken([reports[unit * each] for unit in range(parts)]))
    chosen = awaited(store, "taken", AGREE_S, "process 0's choice of parts")
    unit, within = divmod(topology.rank, each)
    return int(chosen[unit]) * each + within


def parts_of(spec: OrderSpec, ranks: int) -> int:
    """The number of equal parts of the ranks that may change places; 1 for none. A part is the ranks of one canonical node,
    or one rank of several."""
    if not spec.by_node or (ranks % spec.canonical_nodes and spec.canonical_nodes % ranks):
        return 1
    return min(ranks, spec.canonical_nodes)


def taken(held: Sequence[Sequence[int]]) -> list[int]:
    """Choose the part of each unit of ranks. Unit u holds `held[u][p]` of part p. The most that is held goes first; what is
    equal stays in its place."""
    pairs = [
        (-count, unit != part, unit, part) for unit, row in enumerate(held) for part, count in enumerate(row)
    ]
    chosen: dict[int, int] = {}
    for _, _, unit, part in sorted(pairs):
        if unit not in chosen and part not in chosen.values():
            chosen[unit] = part
    return [chosen[unit] for unit in range(len(held))]


def _held(feed: Feed, parts: int) -> list[int]:
    """How many of some extents of each part this node has; nothing where its daemon does not say."""
    spec, layout = feed.spec, feed.layout
    order, found = EpochOrder(spec, layout.extent_first, 0), [0] * parts
    bounds = [part * spec.global_batch // parts for part in range(parts + 1)]
    for opened in layout.parts:
        some = [
            _some(extents_of_part(opened, layout, own))
            for low, high in pairwise(bounds)
            if (own := order.own_extents(low, high)) is not None
        ]
        with suppress(CacheError):
            resident = opened.opened.link.resident(np.concatenate(some).tolist())
            found = [
                count + len(resident.intersection(own.tolist()))
                for count, own in zip(found, some, strict=True)
            ]
    return found


def _some(extents: Ints) -> Ints:
    """Some of these extents, evenly spread."""
    return extents[:: -(-len(extents) // PROBED) or 1]
