"""Reads of cached files with every byte checked: `open_dataset(..., verify=True)`.

Blocks are read whole into this process's memory, digested there, and what the caller wants is cut from what was
digested: a bit that flipped on the disk, in the page cache or between them is seen, whenever it flipped. The digests
are the file's own, behind its bytes and sealed (`tiers/footer.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import CorruptData, TierFailed
from cachesvc.tiers import footer
from cachesvc.tiers.checksum import DIGEST_BYTES, block_digest
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES
from loader.disk import Wanted, announce, read_into
from loader.leased import ORIGINS, Held

FOOTER_WAIT_S = 30.0
"""A file is granted when its bytes are right and gets its footer when its turn to be committed comes."""
FOOTER_PAUSE_S = 0.005
_FILE = ORIGINS.index("nvme")


class Verified:
    """Reads one dataset's files and checks what are cached ones. Safe to share between threads."""

    def __init__(self, catalog: Catalog, suspect: Callable[[Sequence[int]], None]) -> None:
        """`suspect(extents)` tells who granted them that they are wrong; called before they are released."""
        self._catalog = catalog
        self.suspect = suspect

    def read(self, parts: Sequence[Wanted], held: Mapping[int, Held]) -> dict[int, Held]:
        """Fill the views of all parts, but for those of extents that turn out wrong, which it answers.

        Raises TierFailed when a file cannot be read.
        """
        cached = [part for part in parts if held[part.extent].origin == _FILE]
        read_into([part for part in parts if held[part.extent].origin != _FILE])
        wrong: dict[int, Held] = {}
        blocks = [_blocks_of(part, held[part.extent].size_bytes) for part in cached]
        announce(blocks)
        read, digests = Wanted(-1, 0, 0, [], -1), b""
        for part, wanted in sorted(zip(cached, blocks), key=lambda pair: (pair[0].extent, pair[0].offset)):
            copy = held[part.extent]
            if part.extent in wrong:
                continue
            if part.extent != read.extent:
                digests = self._digests(part.extent, copy)
            inside = part.extent == read.extent and (
                wanted.offset + wanted.size_bytes <= read.offset + read.size_bytes
            )
            if not inside:
                read = wanted
                read.views = [memoryview(bytearray(read.size_bytes))]
                read_into([read])
                if not _right(read, digests):
                    wrong[part.extent] = copy
                    continue
            _cut(read, part)
        return wrong

    def _digests(self, extent: int, copy: Held) -> bytes:
        """What the file says of its blocks; nothing when it says nothing sound."""
        if copy.digests is None:
            copy.digests = self._footer(extent, copy)
        return copy.digests

    def _footer(self, extent: int, copy: Held) -> bytes:
        wanted, deadline = self._catalog.extent(extent).id, time.monotonic() + FOOTER_WAIT_S
        try:
            while not footer.is_there(copy.fd, copy.size_bytes) and time.monotonic() < deadline:
                time.sleep(FOOTER_PAUSE_S)  # the daemon's disk thread says nothing to readers
            return footer.read(copy.fd, wanted, copy.size_bytes).digests
        except CorruptData:
            return b""
        except OSError as error:
            raise TierFailed(
                f"the checksums of extent {extent} cannot be read ({error.strerror}); look at the disk that holds it"
            ) from error


def _blocks_of(part: Wanted, extent_bytes: int) -> Wanted:
    """The whole blocks around a part; cached files begin with their extent."""
    start = part.offset // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES
    end = -(-(part.offset + part.size_bytes) // CHECKSUM_BLOCK_BYTES) * CHECKSUM_BLOCK_BYTES
    return Wanted(part.fd, start, min(end, extent_bytes) - start, [], part.extent)


def _right(read: Wanted, digests: bytes) -> bool:
    first = read.offset // CHECKSUM_BLOCK_BYTES
    (memory,) = read.views
    found = b"".join(
        block_digest(memory[at : at + CHECKSUM_BLOCK_BYTES])
        for at in range(0, read.size_bytes, CHECKSUM_BLOCK_BYTES)
    )
    return found == digests[first * DIGEST_BYTES : first * DIGEST_BYTES + len(found)]


def _cut(read: Wanted, part: Wanted) -> None:
    at = part.offset - read.offset
    for view in part.views:
        view[:] = read.views[0][at : at + len(view)]
        at += len(view)
