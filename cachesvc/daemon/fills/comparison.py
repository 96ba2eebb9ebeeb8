"""Compares the bytes that other nodes sent for one fill with the source, and blames a node that sent wrong ones."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from cachesvc.core.errors import CorruptData, SourceUnavailable
from cachesvc.core.placement.comparisons import maker_id
from cachesvc.core.placement.place_search import Patience, ReadEnd, Verdict
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.fills.fill_parts import FillParts
from cachesvc.daemon.fills.shared_fills import Located, SharedFill
from cachesvc.daemon.loop.steps import Steps
from cachesvc.daemon.processes import jobs
from cachesvc.system.descriptors import closing_fd

log = logging.getLogger(__name__)
FromSource = Callable[[jobs.FetchJob, int, int], Steps[jobs.JobDone]]
"""Fetches an extent from the source into a descriptor, once there is memory for it and for so many bytes more."""


@dataclass(frozen=True, slots=True)
class _WrongBytes:
    """A node sent `digests`, and the source has others: `source_digests`, or b"" where it only states a hash."""

    node: str
    maker: int
    digests: bytes
    source_digests: bytes


class Comparison:
    """Compares what other nodes send for one fill."""

    def __init__(self, shared: SharedFill, parts: FillParts, from_source: FromSource) -> None:
        assert parts.sent is not None, "no cluster"
        self._shared, self._extent, self._parts, self._sent = shared, shared.extent, parts, parts.sent
        self._from_source = from_source
        self._givers: set[str] = set()
        """The nodes that gave bytes."""
        self._maker = 0
        """Of what the last node sent."""
        self._wrong: _WrongBytes | None = None
        self.same = False
        """What the last node sent equals the source's bytes."""

    def check(
        self, dataset: ServedDataset, index: int, found: Located, came: jobs.JobDone
    ) -> Steps[jobs.JobDone]:
        """Return the result of a read from a node: as it came, or as failed."""
        if came.peer_bytes:
            self._givers.add(found.node)
        progress = self._shared.progress
        maker = self._maker = progress.maker = progress.maker or maker_id(found.node)
        if not came.code and (self._sent.due(self._extent, came.peer_bytes, maker) or found.compare):
            came = yield from self._compare(dataset, index, found, came)
        if not came.code and self._sent.doubtful(maker) and not self.same:
            return _failed(came, "its maker made wrong bytes of another extent", ReadEnd.LACKS)
        if came.end is ReadEnd.WRONG and self._wrong is None:
            self._wrong = _WrongBytes(found.node, maker, came.digests, b"")
        elif came.code == CorruptData.code and came.end is not ReadEnd.WRONG:
            self._parts.wrong_copy(found.node, self._extent, False)
        return came

    def _compare(
        self, dataset: ServedDataset, index: int, found: Located, came: jobs.JobDone
    ) -> Steps[jobs.JobDone]:
        size_bytes = dataset.sizes[index]
        patience = Patience(self._parts.shared.times.late_s(size_bytes))
        try:
            with _memory(size_bytes) as scratch:
                job = jobs.FetchJob(dataset.id, index, patience=patience)
                read = yield from self._from_source(job, scratch, size_bytes)
        except OSError as error:
            read = jobs.JobDone(SourceUnavailable.code, str(error))
        if read.code or read.holes:
            self._sent.not_compared()
            unsure = "its maker made wrong bytes before, and the source gives nothing to compare with"
            doubtful = found.compare or self._sent.doubtful(self._maker)
            return _failed(came, unsure, ReadEnd.LACKS) if doubtful else came
        self.same = read.digests == came.digests
        self._sent.results["same" if self.same else "wrong"] += 1
        if self.same:
            if found.compare and self._maker == maker_id(found.node):
                self._sent.right(found.node)
            return came
        self._wrong = _WrongBytes(found.node, self._maker, came.digests, read.digests)
        return _failed(came, f"{found.node} sent other bytes than the source has", ReadEnd.WRONG)

    def conclude(self, dataset: ServedDataset, digests: bytes, from_node: bool) -> None:
        """Note where the bytes came from. A node is blamed for wrong ones, unless this node's own two reads of the source
        differ, or several nodes gave parts."""
        self._shared.progress.maker = self._maker if from_node else 0
        self._sent.came(self._extent, self._shared.progress.maker)
        wrong = self._wrong
        if wrong is None or from_node:
            return
        about = {"extent": self._extent.hex(), "peers": sorted(self._givers)}
        if digests == wrong.digests or wrong.source_digests not in (b"", digests):
            log.error("two reads of the source differ; look at the memory of this node", extra=about)
        elif len(self._givers) > 1:
            log.error("one of several nodes sent wrong bytes", extra=about)
        else:
            maker = self._sent.name_of(wrong.maker, wrong.node)
            why = f"it made other bytes of extent {self._extent.hex()} than the source has"
            self._parts.judged([Verdict(maker, failure=why, wrong=True)])
            for node in {maker, wrong.node}:
                self._parts.wrong_copy(node, self._extent, True)
            self._sent.wrong(maker, self._extent, dataset)


def _failed(came: jobs.JobDone, why: str, end: ReadEnd) -> jobs.JobDone:
    return msgspec.structs.replace(came, code=CorruptData.code, message=why, end=end)


@contextmanager
def _memory(size_bytes: int) -> Iterator[int]:
    """Lend memory as a descriptor. Raises OSError."""
    with closing_fd(os.memfd_create("cachesvc:comparison", os.MFD_CLOEXEC)) as fd:
        os.ftruncate(fd, size_bytes)
        yield fd
