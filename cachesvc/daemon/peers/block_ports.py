"""The health of the other nodes as this one sees it, and regular checks of the ports at which they send extents."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from cachesvc.core.placement.peer_health import PlaceHealth, PlacesHealth, Source
from cachesvc.core.placement.place_search import Verdict
from cachesvc.daemon.blocks.client import BlockClient, PeerFailed
from cachesvc.daemon.ports import next_port

TRIES = 3
"""Checks in a row that a port fails before its node is left out."""


class BlockPorts:
    """Safe from any thread. `client` sends the checks."""

    def __init__(self, client: BlockClient, now: Callable[[], float] = time.monotonic) -> None:
        self._client = client
        self._now = now
        self._health = PlacesHealth()
        self._lock = threading.Lock()

    def check(self, node: str, address: str) -> None:
        """Check the port next to `address`, HOST:PORT, the one of a node's calls. Blocks for up to `TRIES` time limits."""
        why = ""
        for _ in range(TRIES):
            began = self._now()
            try:
                self._client.check(next_port(address))
            except PeerFailed as error:
                why = str(error)
            else:
                with self._lock:
                    self._health.answered(node, self._now() - began)
                return
        with self._lock:
            self._health.silent(node, why, self._now())

    def judge(self, verdict: Verdict) -> None:
        """Take what a fill learned of a place."""
        with self._lock:
            self._health.judge(verdict, self._now())

    def source(self, size_bytes: int, retries: int, throttled: int) -> Source:
        """Take the counters of all requests to the source; return how it answers this node."""
        with self._lock:
            return self._health.source(size_bytes, retries, throttled, self._now())

    def left_out(self) -> tuple[str, ...]:
        """The places from which nothing is to be read now."""
        with self._lock:
            return tuple(self._health.left_out(self._now()))

    def begin(self, node: str) -> bool:
        """Return whether a read from a place may begin, which may be the probe of one that failed."""
        with self._lock:
            return self._health.begin(node, self._now())

    def suspected(self, node: str) -> bool:
        """Return whether a node sent wrong bytes, so that what it sends now is to be compared with the source."""
        with self._lock:
            return self._health.of(node).wrong

    def of(self, node: str) -> tuple[str, PlaceHealth]:
        """Return the state of a place now, and its record."""
        with self._lock:
            record = self._health.of(node)
            return record.state(self._now()), record

    def restarted(self, node: str) -> None:
        """Forget what the former process of a node did."""
        with self._lock:
            self._health.reset(node)

    def forget(self, members: Collection[str]) -> None:
        """Forget all nodes but the members."""
        with self._lock:
            self._health.forget(members)
