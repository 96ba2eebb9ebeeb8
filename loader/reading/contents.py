"""Digests of the bytes that each extent had when it was granted, which a run's digest sums."""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence

import numpy as np
from torch.utils.data import get_worker_info
from xxhash import xxh3_128_digest

from cachesvc.client.protocol import Granted, Grants, Refused
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.limits import ACQUIRE_S
from cachesvc.core.wire import NO_DATASET as UNKNOWN
from cachesvc.tiers.checksum import checksums_of
from loader.reading.active_reads import Ints

_log = logging.getLogger("cachesvc")
AT_ONCE = 16
"""Extents that are leased at once for their digests."""


class Contents:
    """The digests of the bytes of a dataset's extents, as this process and its workers were granted them. 16 bytes for each
    extent that is known. Safe to share between threads."""

    def __init__(self, extents: int) -> None:
        self._known = np.zeros(extents, f"V{len(UNKNOWN)}")
        self._unreported = deque[tuple[int, bytes]]()
        """What this worker process has yet to report to its trainer."""

    def note(self, extent: int, content: bytes) -> None:
        """Enter the digest of a granted extent. Bytes that differ from earlier ones of the same version are logged, and
        give the extent a digest that no other run has."""
        known = self._known[extent].tobytes()
        if content == known or not content:
            return
        if known != UNKNOWN:
            _log.error("extent %d had other bytes before, in the same version of the data", extent)
            content = xxh3_128_digest(min(known, content) + max(known, content))
        self._known[extent] = np.void(content)
        if get_worker_info() is not None:
            self._unreported.append((extent, content))

    def take_unreported(self) -> list[tuple[int, bytes]]:
        """Return what this worker process noted since the last call."""
        return [self._unreported.popleft() for _ in range(len(self._unreported))]

    def unknown(self, extents: Ints) -> Ints:
        """Return those of `extents` whose digests are not known."""
        found: Ints = extents[self._known[extents] == np.void(UNKNOWN)]
        return found

    def of(self, extents: Ints) -> list[bytes]:
        """Return the digests of extents, all of which are known."""
        return [each.tobytes() for each in self._known[extents]]


class NotingGrants:
    """Notes the digests of what `grants` grants."""

    def __init__(self, grants: Grants, contents: Contents) -> None:
        self._grants, self._contents = grants, contents
        self.release, self.passed, self.close = grants.release, grants.passed, grants.close

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`."""
        answers = self._grants.acquire(extents, timeout_s)
        for answer in answers:
            if isinstance(answer, Granted):
                self._contents.note(answer.extent, answer.content)
        return answers


def learn(grants: Grants, contents: Contents, extents: Ints) -> None:
    """Lease extents for their digests. Bytes that their holder has not digested, such as those of local files that are read
    in place, are read here. Raises OutOfSpace, and as `Grants.acquire`."""
    for start in range(0, len(extents), AT_ONCE):
        for extent in _refused(grants, contents, extents[start : start + AT_ONCE].tolist()):
            # Direct reads refuse a file at the first request where its copy has no room.
            if _refused(grants, contents, [extent]) and _refused(grants, contents, [extent]):
                raise OutOfSpace(
                    f"no room for extent {extent}, whose digest is needed; give the daemon more --ram"
                )


def _refused(grants: Grants, contents: Contents, extents: list[int]) -> list[int]:
    """Note the digests of extents, and return those that were refused."""
    answers = grants.acquire(extents, ACQUIRE_S)
    granted = [answer for answer in answers if isinstance(answer, Granted)]
    try:
        for each in granted:
            content = each.content or checksums_of(each.fd, each.offset, each.size_bytes).content
            contents.note(each.extent, content)
    finally:
        for each in granted:
            os.close(each.fd)
        grants.release([each.extent for each in granted])
    return [answer.extent for answer in answers if isinstance(answer, Refused)]
