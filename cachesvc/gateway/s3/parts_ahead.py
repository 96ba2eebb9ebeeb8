"""Parts of objects that are leased before a client asks for them: the source is read meanwhile."""

from __future__ import annotations

import asyncio
from collections import OrderedDict

from cachesvc.client.object_reads import LeasedPart, ObjectReads
from cachesvc.core.model import ObjectVersion

AHEAD, AHEAD_OF_ALL = 4, 64
"""Parts that are leased while the one before them is sent, for one reader and for all together: the daemon fetches them
side by side, and evicts none of them."""
AHEAD_S = 10.0
"""A part that nobody has asked for after this time is given back."""
READ_S = 300.0
"""The longest wait for a part: a cold extent behind a throttled source takes minutes."""
MAX_READERS = 1024
"""Objects whose last range is remembered."""
_Lease = asyncio.Task[LeasedPart | None]


class PartsAhead:
    """Leases parts ahead of readers. For one event loop."""

    def __init__(self, reads: ObjectReads, part_bytes: int) -> None:
        self._reads, self._part_bytes = reads, part_bytes
        self._leases: OrderedDict[tuple[ObjectVersion, int], _Lease] = OrderedDict()
        self._ranges: OrderedDict[ObjectVersion, tuple[int, int]] = OrderedDict()
        """The end of the last range of each object, and the end of what was leased ahead of it."""

    def lease(self, version: ObjectVersion, at: int) -> None:
        """Begin to lease the part that holds a byte."""
        key = version, at
        if key in self._leases:
            return
        self._leases[key] = asyncio.ensure_future(self._reads.lease(version, at, READ_S, 0.0))
        asyncio.get_running_loop().call_later(AHEAD_S, self._give_back, key, self._leases[key])
        while len(self._leases) > AHEAD_OF_ALL:
            self._give_back(*next(iter(self._leases.items())))

    def take(self, version: ObjectVersion, at: int) -> _Lease | None:
        """Return the lease that was begun for a byte, which is the caller's from now on; None without one."""
        return self._leases.pop((version, at), None)

    def read(self, version: ObjectVersion, begin: int, end: int) -> None:
        """Note that a range is read. Where it begins at the end of the one before it, the parts behind it are leased."""
        size, (last, ahead) = self._part_bytes, self._ranges.pop(version, (-1, 0))
        if begin == last:
            ahead = max(ahead, -(-end // size) * size)
            while ahead < min(end + AHEAD * size, version.size_bytes):
                self.lease(version, ahead)
                ahead += size
        self._ranges[version] = end, ahead
        if len(self._ranges) > MAX_READERS:
            self._ranges.popitem(last=False)

    def _give_back(self, key: tuple[ObjectVersion, int], lease: _Lease) -> None:
        if self._leases.get(key) is lease:
            del self._leases[key]
            lease.cancel()
            lease.add_done_callback(self._ended)

    def _ended(self, lease: _Lease) -> None:
        if not lease.cancelled() and not lease.exception() and (part := lease.result()) is not None:
            self._reads.release(part)
