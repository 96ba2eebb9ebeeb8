"""Reads extents from other nodes for jobs: the blocks that a fill lacks, or a complete copy of prepared samples."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from cachesvc.core.errors import CacheError, CorruptData, SourceUnavailable
from cachesvc.core.model import Extent
from cachesvc.core.placement.place_search import ReadEnd
from cachesvc.daemon.blocks.client import BlockClient, PeerAborted, PeerFailed, PeerLacks, PeerLate
from cachesvc.daemon.processes.jobs import MAX_MESSAGE_CHARS, FetchJob, JobDone
from cachesvc.sources.stated_hashes import check_stated
from cachesvc.tiers.fill_progress import FillProgress, own_progress
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES


def read_blocks(
    nodes: BlockClient, job: FetchJob, target: int, extent: Extent, progress: FillProgress
) -> JobDone:
    """Fetch the missing blocks. What came is counted also where the node fails in the middle."""
    before, digests, code, message = _complete_bytes(progress), b"", 0, ""
    end: ReadEnd | None = None
    try:
        digests = nodes.read(job.address, extent.id, extent.size_bytes, target, progress, job.patience)
        check_stated(extent, target)
    except PeerFailed as error:
        code, message, end = SourceUnavailable.code, str(error), _end(error)
    except CorruptData as error:
        code, message, end = error.code, str(error), ReadEnd.FAILED
    except SourceUnavailable as error:
        code, message, end = CorruptData.code, str(error), ReadEnd.WRONG
    except CacheError as error:
        code, message = error.code, str(error)
    came = _complete_bytes(progress) - before
    return JobDone(code, message[:MAX_MESSAGE_CHARS], digests=digests, peer_bytes=came, end=end)


def read_copy(nodes: BlockClient, job: FetchJob, target: int, extent: Extent) -> JobDone:
    """Fetch a complete copy, which nobody follows meanwhile. The node tells the size of an uneven extent."""
    if job.most_bytes:
        try:
            size_bytes = nodes.size_of(job.address, extent.id, job.most_bytes)
        except PeerFailed as error:
            return JobDone(SourceUnavailable.code, str(error), end=_end(error))
        extent = replace(extent, size_bytes=size_bytes)
    with own_progress(extent.size_bytes) as progress:
        done = read_blocks(nodes, job, target, extent, progress)
    return msgspec.structs.replace(done, size_bytes=extent.size_bytes)


def _end(error: PeerFailed) -> ReadEnd:
    if isinstance(error, PeerLate):
        return ReadEnd.LATE
    return ReadEnd.LACKS if isinstance(error, (PeerLacks, PeerAborted)) else ReadEnd.FAILED


def _complete_bytes(progress: FillProgress) -> int:
    blocks = sum(count for _, count in progress.runs(0, progress.blocks))
    return min(blocks * CHECKSUM_BLOCK_BYTES, progress.size_bytes)
