"""Which extents that came from other nodes are compared with the source.

The digests of an extent are made by the node that fetched it. They show what changed on the way, and not what that node's
memory or program had changed before. So some extents are fetched a second time, and compared before they are granted.

Bytes go from node to node, so the name of that node, their *maker*, goes with them: it is to blame and not the sender, and
what it made is doubted wherever it comes from.
"""

from __future__ import annotations

import hashlib

from cachesvc.core.model import ExtentId

SHARE = 0.01
"""The part of the data that all nodes together fetch a second time, unless the settings say otherwise."""
PAUSE_S = 60.0
"""Nothing is compared for this time after the source has throttled a request, or did not give an extent in time."""
MAX_DOUBTED = 1024
"""Extents of which another node said that they are wrong here; of older ones nothing is remembered."""


def maker_id(node: str) -> int:
    """Return the number, 64 bits and not 0, that stands for a node as a maker."""
    return int.from_bytes(hashlib.blake2b(node.encode(), digest_size=8).digest(), "little") or 1


class Comparisons:
    """The choice. Time is an argument."""

    def __init__(self, share: float | None) -> None:
        """`share`: the part of the extents from other nodes, 0 to 1. None: all nodes together compare `SHARE`."""
        self._share = share
        self._came_bytes = self._compared_bytes = 0
        self._doubted: dict[ExtentId, None] = {}
        self._throttled = 0
        self._paused_until = 0.0

    def due(self, extent: ExtentId, size_bytes: int, others: int, throttled: int, now: float) -> bool:
        """Count an extent that came from a node; return whether it is to be compared.

        `others`: the members beside this node. `throttled`: the requests that sources have throttled since the start.
        """
        self._came_bytes += size_bytes
        if throttled > self._throttled:
            self._throttled, self._paused_until = throttled, now + PAUSE_S
        share = SHARE / max(1, others) if self._share is None else self._share
        wanted = self._compared_bytes + size_bytes <= share * self._came_bytes
        if share == 0 or now < self._paused_until or not (wanted or extent in self._doubted):
            return False
        self._doubted.pop(extent, None)
        self._compared_bytes += size_bytes
        return True

    def failed(self, now: float) -> None:
        """Note that the source did not give an extent to compare with."""
        self._paused_until = now + PAUSE_S

    def doubt(self, extent: ExtentId) -> None:
        """Compare an extent when it comes next, since another node found that it is wrong here."""
        self._doubted[extent] = None
        if len(self._doubted) > MAX_DOUBTED:
            del self._doubted[next(iter(self._doubted))]
