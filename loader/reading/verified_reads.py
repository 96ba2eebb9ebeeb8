"""Reads of cached files with every byte checked: `open_dataset(..., verify=True)`.

Blocks are read whole into this process's memory, digested there, and what the caller wants is cut from what was
digested: a bit that flipped on the disk, in the page cache or between them is seen, whenever it flipped. The digests
are the file's own, behind its bytes and sealed (`tiers/footer.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import CorruptData, TierFailed
from cachesvc.tiers import footer
from cachesvc.tiers.checksum import DIGEST_BYTES, block_digest
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES
from loader.reading.lease_table import ORIGINS, HeldExtent
from loader.reading.preadv import FileRange, announce, read_into

FOOTER_WAIT_S = 30.0
"""A file is granted when its bytes are right and gets its footer when its turn to be committed comes."""
FOOTER_PAUSE_S = 0.005
RUN_BYTES = 1 << 20
"""Read and digested at once, where parts lie close: it stays in the processor's cache."""
_FILE = ORIGINS.index("nvme")


class VerifiedReads:
    """Reads one dataset's files and checks what are cached ones. Safe to share between threads."""

    def __init__(self, catalog: Catalog, suspect: Callable[[Sequence[int]], None]) -> None:
        """`suspect(extents)` tells who granted them that they are wrong; called before they are released."""
        self._catalog = catalog
        self.suspect = suspect

    def read(self, parts: Sequence[FileRange], held: Mapping[int, HeldExtent]) -> dict[int, HeldExtent]:
        """Fill the views of all parts, but for those of extents that turn out wrong, which it answers.

        Raises TierFailed when a file cannot be read.
        """
        read_into([part for part in parts if held[part.extent].origin != _FILE])
        runs = list(_runs([part for part in parts if held[part.extent].origin == _FILE], held))
        announce([run.blocks for run in runs])
        scratch = np.empty(max((run.blocks.size_bytes for run in runs), default=0), np.uint8)
        wrong: dict[int, HeldExtent] = {}
        for run in runs:
            blocks = run.blocks
            if blocks.extent in wrong:
                continue
            digests = self._digests(blocks.extent, held[blocks.extent])
            blocks.views = [scratch.data[: blocks.size_bytes]]
            read_into([blocks])
            if _right(blocks, digests):
                _cut(run)
            else:
                wrong[blocks.extent] = held[blocks.extent]
        return wrong

    def _digests(self, extent: int, copy: HeldExtent) -> bytes:
        """What the file says of its blocks; nothing when it says nothing sound."""
        if copy.digests is None:
            copy.digests = self._footer(extent, copy)
        return copy.digests

    def _footer(self, extent: int, copy: HeldExtent) -> bytes:
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


@dataclass(slots=True)
class _Run:
    """Consecutive whole blocks of one file, and the parts to be cut from them."""

    blocks: FileRange
    parts: list[FileRange]


def _runs(parts: Iterable[FileRange], held: Mapping[int, HeldExtent]) -> Iterator[_Run]:
    """The blocks around all parts; cached files begin with their extent."""
    run: _Run | None = None
    for part in sorted(parts, key=lambda part: (part.extent, part.offset)):
        start = part.offset // CHECKSUM_BLOCK_BYTES * CHECKSUM_BLOCK_BYTES
        end = -(-(part.offset + part.size_bytes) // CHECKSUM_BLOCK_BYTES) * CHECKSUM_BLOCK_BYTES
        if run is not None and run.blocks.extent == part.extent:
            blocks = run.blocks
            end = max(end, blocks.offset + blocks.size_bytes)
            if start <= blocks.offset + blocks.size_bytes and end - blocks.offset <= RUN_BYTES:
                blocks.size_bytes = min(end, held[part.extent].size_bytes) - blocks.offset
                run.parts.append(part)
                continue
        if run is not None:
            yield run
        size_bytes = min(end, held[part.extent].size_bytes) - start
        run = _Run(FileRange(part.fd, start, size_bytes, [], part.extent), [part])
    if run is not None:
        yield run


def _right(read: FileRange, digests: bytes) -> bool:
    first = read.offset // CHECKSUM_BLOCK_BYTES
    (memory,) = read.views
    found = b"".join(
        block_digest(memory[at : at + CHECKSUM_BLOCK_BYTES])
        for at in range(0, read.size_bytes, CHECKSUM_BLOCK_BYTES)
    )
    return found == digests[first * DIGEST_BYTES : first * DIGEST_BYTES + len(found)]


def _cut(run: _Run) -> None:
    (memory,) = run.blocks.views
    for part in run.parts:
        at = part.offset - run.blocks.offset
        for view in part.views:
            view[:] = memory[at : at + len(view)]
            at += len(view)
