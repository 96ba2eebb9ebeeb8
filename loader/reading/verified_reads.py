"""Reads of cached files with every byte verified: `open_dataset(..., verify=True)`.

Whole blocks are read into this process's memory and digested there, and the wanted bytes are copied from them: a bit
that flipped on the disk, in the page cache or between them is detected, whenever it flipped. The expected digests are
in the file itself, behind its bytes, in a sealed footer (`tiers/footer.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import CorruptData, TierFailed
from cachesvc.core.limits import FOOTER_S
from cachesvc.system.deadline import Deadline
from cachesvc.tiers import footer
from cachesvc.tiers.checksum import DIGEST_BYTES, block_digest
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES
from loader.reading.held_extents import ORIGINS, HeldExtent
from loader.reading.preadv import FileRange, announce, read_into

FOOTER_PAUSE_S = 0.005
RUN_BYTES = 1 << 20
"""The most that is read and digested at once: it stays in the processor's cache."""
_FILE = ORIGINS.index("nvme")


class VerifiedReads:
    """Reads one dataset's files and verifies the cached ones. Safe to share between threads."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def read(self, parts: Sequence[FileRange], held: Mapping[int, HeldExtent]) -> dict[int, HeldExtent]:
        """Fill the views of all parts, except those of corrupt extents, and return these extents.

        Raises TierFailed when a file cannot be read.
        """
        read_into([part for part in parts if held[part.extent].origin != _FILE])
        runs = list(_runs([part for part in parts if held[part.extent].origin == _FILE], held))
        announce([run.blocks for run in runs])
        scratch = np.empty(max((run.blocks.size_bytes for run in runs), default=0), np.uint8)
        corrupt: dict[int, HeldExtent] = {}
        for run in runs:
            blocks = run.blocks
            if blocks.extent in corrupt:
                continue
            digests = self._digests(blocks.extent, held[blocks.extent])
            blocks.views = [scratch.data[: blocks.size_bytes]]
            read_into([blocks])
            if _match(blocks, digests):
                _copy_parts(run)
            else:
                corrupt[blocks.extent] = held[blocks.extent]
        return corrupt

    def _digests(self, extent: int, copy: HeldExtent) -> bytes:
        """The digests of a file's blocks; b"" when its footer is not valid, or not that of the copy that was granted."""
        if copy.digests is None:
            copy.digests = self._footer(extent, copy)
        return copy.digests

    def _footer(self, extent: int, copy: HeldExtent) -> bytes:
        wanted, deadline = self._catalog.extent(extent).id, Deadline(FOOTER_S)
        try:
            while not footer.is_there(copy.fd, copy.size_bytes):
                if not deadline.pause(FOOTER_PAUSE_S):  # the daemon sends no message when it commits a file
                    break
            found = footer.read(copy.fd, wanted, copy.size_bytes)
            return found.digests if copy.content in (b"", found.content) else b""
        except CorruptData:
            return b""
        except OSError as error:
            failed = TierFailed(
                f"the checksums of extent {extent} cannot be read ({error.strerror}); look at the disk that holds it"
            )
            failed.extent = extent
            raise failed from error


@dataclass(slots=True)
class _Run:
    """Consecutive whole blocks of one file, and the parts to be copied from them."""

    blocks: FileRange
    parts: list[FileRange]


def _runs(parts: Iterable[FileRange], held: Mapping[int, HeldExtent]) -> Iterator[_Run]:
    """The blocks that contain the parts. A cached file begins with its extent."""
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


def _match(blocks: FileRange, digests: bytes) -> bool:
    first = blocks.offset // CHECKSUM_BLOCK_BYTES
    (memory,) = blocks.views
    found = b"".join(
        block_digest(memory[at : at + CHECKSUM_BLOCK_BYTES])
        for at in range(0, blocks.size_bytes, CHECKSUM_BLOCK_BYTES)
    )
    return found == digests[first * DIGEST_BYTES : first * DIGEST_BYTES + len(found)]


def _copy_parts(run: _Run) -> None:
    (memory,) = run.blocks.views
    for part in run.parts:
        at = part.offset - run.blocks.offset
        for view in part.views:
            view[:] = memory[at : at + len(view)]
            at += len(view)
