"""Decides which extents from other nodes are compared with the source. Notes which node made each copy, and drops the
copies of a node that made wrong bytes."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence

from cachesvc.core import events
from cachesvc.core.model import ExtentId
from cachesvc.core.node.node import Node
from cachesvc.core.placement.comparisons import Comparisons, maker_id
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.events.event import Event, record

RESULTS = ("same", "wrong", "failed")
"""Of a comparison; `failed`: the source did not give the extent."""


class SentBytes:
    """Runs on the loop's thread. Makers of copies are forgotten when the daemon ends."""

    def __init__(
        self,
        share: float | None,
        node: Node,
        handle: Callable[[events.Event], None],
        members: Callable[[], Sequence[str]],
        throttled: Callable[[], int],
    ) -> None:
        """`share`: of `Comparisons`; nothing is compared where this account pays for its requests. `members` returns the
        names of the members, this node included, `throttled` the number of requests which sources have throttled."""
        pays = os.environ.get("AWS_REQUEST_PAYER", "").lower() == "requester"
        self._comparisons = Comparisons(0.0 if pays else share)
        self._node, self._handle, self._members, self._throttled = node, handle, members, throttled
        self._makers: dict[ExtentId, int] = {}
        self._wrong: set[int] = set()
        self.results: Counter[str] = Counter()

    def due(self, extent: ExtentId, size_bytes: int, maker: int) -> bool:
        """Return whether an extent that came from a node is to be compared with the source before it is granted."""
        others, now = len(self._members()) - 1, time.monotonic()
        return self._comparisons.due(extent, size_bytes, others, self._throttled(), now) or self.doubtful(
            maker
        )

    def doubtful(self, maker: int) -> bool:
        """Return whether a node was found to make wrong bytes."""
        return maker in self._wrong

    def not_compared(self) -> None:
        """Count a comparison for which the source did not give the extent."""
        self.results["failed"] += 1
        self._comparisons.failed(time.monotonic())

    def came(self, extent: ExtentId, maker: int) -> None:
        """Note the maker of an extent; 0 for this node."""
        if maker:
            self._makers[extent] = maker
        else:
            self._makers.pop(extent, None)

    def maker_of(self, extent: ExtentId) -> int:
        """Return the maker of a resident extent; 0 for this node, and where it is not known."""
        return self._makers.get(extent, 0)

    def evicted(self, extent: ExtentId) -> None:
        """Forget the maker of an extent that no tier holds any more."""
        if self._node.where(extent) is None:
            self._makers.pop(extent, None)

    def name_of(self, maker: int, sender: str) -> str:
        """Return the name of a maker; that of the sender for one that is no member."""
        return next((name for name in self._members() if maker_id(name) == maker), sender)

    def right(self, node: str) -> None:
        """Doubt a node no more: a probe of it equals the source."""
        self._wrong.discard(maker_id(node))

    def wrong(self, node: str, extent: ExtentId, dataset: ServedDataset) -> None:
        """Drop all that was made by a node that made wrong bytes, and doubt what else comes of it."""
        if self.doubtful(maker_id(node)):
            return
        self._wrong.add(maker_id(node))
        made = [each for each, maker in self._makers.items() if maker == maker_id(node)]
        record(
            Event(
                "wrong_bytes",
                node=node,
                extent=extent.hex(),
                dataset=dataset.id,
                uri=dataset.catalog.uri,
                extents=len(made),
                why="an extent of its making differs from the source; look at its memory",
            )
        )
        for each in made:
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
        self._makers.pop(extent, None)
        for tier in self._node.policy.tiers:
            self._handle(events.FillAgain(extent, tier))
