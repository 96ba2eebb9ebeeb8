"""What other nodes sent: which of it is compared with the source, from which node each copy came, and what is dropped
where a node sent wrong bytes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable

from cachesvc.core import events
from cachesvc.core.model import ExtentId
from cachesvc.core.node.node import Node
from cachesvc.core.placement.comparisons import Comparisons
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.events.event import Event, record

RESULTS = ("same", "wrong", "failed")
"""Of a comparison; `failed`: the source did not give the extent."""


class SentBytes:
    """Runs on the loop's thread. Origins of copies are forgotten when the daemon ends."""

    def __init__(
        self,
        share: float | None,
        node: Node,
        handle: Callable[[events.Event], None],
        others: Callable[[], int],
        throttled: Callable[[], int],
    ) -> None:
        """`share`: of `Comparisons`; nothing is compared where this account pays for its requests. `others` returns the
        number of members beside this node, `throttled` that of requests which sources have throttled."""
        pays = os.environ.get("AWS_REQUEST_PAYER", "").lower() == "requester"
        self._comparisons = Comparisons(0.0 if pays else share)
        self._node, self._handle, self._others, self._throttled = node, handle, others, throttled
        self._origins: dict[ExtentId, frozenset[str]] = {}
        self._wrong_at: dict[str, float] = {}
        self.results: Counter[str] = Counter()

    def due(self, extent: ExtentId, size_bytes: int) -> bool:
        """Return whether an extent that came from a node is to be compared with the source before it is granted."""
        return self._comparisons.due(extent, size_bytes, self._others(), self._throttled(), time.monotonic())

    def not_compared(self) -> None:
        """Count a comparison for which the source did not give the extent."""
        self.results["failed"] += 1
        self._comparisons.failed(time.monotonic())

    def came(self, extent: ExtentId, nodes: frozenset[str]) -> None:
        """Note the nodes that gave an extent; none where the source did."""
        if nodes:
            self._origins[extent] = nodes
        else:
            self._origins.pop(extent, None)

    def evicted(self, extent: ExtentId) -> None:
        """Forget the origin of an extent that no tier holds any more."""
        if self._node.where(extent) is None:
            self._origins.pop(extent, None)

    def doubtful(self, node: str, began: float) -> bool:
        """Return whether a node was found to send wrong bytes after a read of it began."""
        return self._wrong_at.get(node, began) > began

    def wrong(self, node: str, extent: ExtentId, dataset: ServedDataset) -> None:
        """Drop all that came from a node which sent wrong bytes."""
        self._wrong_at[node] = time.monotonic()
        taken = [each for each, nodes in self._origins.items() if node in nodes]
        record(
            Event(
                "wrong_bytes",
                node=node,
                extent=extent.hex(),
                dataset=dataset.id,
                uri=dataset.catalog.uri,
                extents=len(taken),
                why="an extent from it differs from the source; look at its memory",
            )
        )
        for each in taken:
            self._drop(each)

    def told(self, node: str, extent: ExtentId) -> None:
        """Drop a copy of which another node found that it differs from the source, and compare the next one from a node."""
        record(
            Event(
                "wrong_bytes_here",
                node=node,
                extent=extent.hex(),
                why="it says that this node sent an extent which differs from the source",
            )
        )
        self._comparisons.doubt(extent)
        self._drop(extent)

    def _drop(self, extent: ExtentId) -> None:
        self._origins.pop(extent, None)
        for tier in self._node.policy.tiers:
            self._handle(events.FillAgain(extent, tier))
