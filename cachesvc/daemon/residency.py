"""Questions about a dataset's extents on this node. They read only: a walk over extents takes 7 us for each, too long for
the loop, so it may run on any thread."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.core.node.node import Node
from cachesvc.daemon.datasets import ServedDataset

CELLS = 200
"""Cells of a residency map: as many as a page shows side by side."""


def resident(node: Node, dataset: ServedDataset) -> list[tuple[ExtentId, TierName]]:
    """A dataset's extents that can be granted now, each with its tier."""
    found = ((extent, node.where(extent)) for extent in dataset.extent_ids)
    return [(extent, tier) for extent, tier in found if tier is not None]


def sizes_of(node: Node, dataset: ServedDataset) -> Sequence[int]:
    """The sizes of a dataset's extents in bytes. Those of uneven ones are known once they were made; before, they are the
    most that they may take."""
    if not dataset.uneven:
        return dataset.sizes
    known = map(node.size_of, dataset.extent_ids)
    return [size_bytes or most_bytes for size_bytes, most_bytes in zip(known, dataset.sizes, strict=True)]


def out_of_reach(node: Node, dataset: ServedDataset) -> list[ExtentId]:
    """A dataset's extents in lost tiers, from which they cannot be evicted."""
    lost = [tier for tier in node.policy.tiers.values() if tier.lost]
    entries = node.copies.entries

    def held(extent: ExtentId) -> bool:
        entry = entries.get(extent)
        copies = tuple(entry.copies) if entry else ()
        return any(copy.tier.lost for copy in copies) or any(extent in tier.dormant for tier in lost)

    return [extent for extent in dataset.extent_ids if held(extent)] if lost else []


def is_claimed(node: Node, dataset: ServedDataset) -> bool:
    """Tell whether a job or pin claims the dataset."""
    return dataset.id in node.policy.shares.datasets


def in_use(node: Node, dataset: ServedDataset) -> bool:
    """Tell whether the node has any of the dataset's extents: resident, filling or demanded. O(the smaller set).

    Resident extents of a file that was opened by its name do not count: its catalog is loaded again at its next opening.
    """
    wanted = dataset.index_of.keys()
    if dataset.is_one_file:
        known = (node.copies.entries.get(extent) for extent in wanted)
        return any(entry is not None and entry.in_progress for entry in known)
    found = (tier.dormant.keys() for tier in node.policy.tiers.values())
    return not (node.copies.entries.keys().isdisjoint(wanted) and all(map(wanted.isdisjoint, found)))


def cells(
    sizes: Sequence[int], places: Sequence[TierName | None], filling: Collection[int]
) -> list[tuple[int, int, int]]:
    """Cut a dataset's extents into at most `CELLS` runs of equal numbers of extents.

    `sizes`, in bytes, and `places` have one item for each extent; `filling` has the indices of extents on the way. Returns
    for each run the percentages of its bytes in RAM, on NVMe and on the way. A part that is not all is at most 99, one that
    is not nothing at least 1.
    """
    total, count, coming = len(sizes), min(CELLS, len(sizes)), set(filling)
    found = []
    for cell in range(
        count
    ):  # in steps: one call over a million extents would hold the interpreter's lock for too long
        begin, end = -(-cell * total // count), -(-(cell + 1) * total // count)
        ram = nvme = fills = whole = 0
        for index in range(begin, end):
            size_bytes, place = max(1, sizes[index]), places[index]
            whole += size_bytes
            if place == RAM:
                ram += size_bytes
            elif place is not None:
                nvme += size_bytes
            elif index in coming:
                fills += size_bytes
        found.append((_percent(ram, whole), _percent(nvme, whole), _percent(fills, whole)))
    return found


def _percent(part: int, whole: int) -> int:
    return max(1, 100 * part // whole) if part else 0
