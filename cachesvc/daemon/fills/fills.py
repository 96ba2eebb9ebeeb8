"""Execution of fills: reserve in the tier, fill in a filler process, commit.

When a tier is lost, its fills are answered at once, and aborted on its thread after the calls under way.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from cachesvc.catalog.survey import provisional_id
from cachesvc.core import commands, events
from cachesvc.core.errors import CacheError, CorruptData, OutOfSpace, SourceUnavailable, TierFailed, from_code
from cachesvc.core.model import DatasetId, ExtentId, TierName
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.commits import Commits
from cachesvc.daemon.fills.fill_memory import FillMemory, memory_needed
from cachesvc.daemon.fills.holes import CopyHoles, HoleRecords
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.fills.shared_fills import MAX_NODES, Locate, Located, SharedFill, SharedFills
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.processes import jobs
from cachesvc.tiers.tier import Checksums, PersistentTier, Tier

log = logging.getLogger(__name__)
_CopyKey = tuple[ExtentId, TierName]
T = TypeVar("T")


class Fills:
    """Executes `StartFill`. Runs on the loop's thread; the result of a call or job is ignored once its tier is lost."""

    def __init__(
        self,
        tiers: Mapping[TierName, Tier],
        lanes: Mapping[TierName, Lane],
        commits: Commits,
        datasets: Datasets,
        fillers: FillerPool,
        checks: Checks,
        hole_records: HoleRecords,
        handle: Callable[[events.Event], None],
        memory: FillMemory,
        shared: SharedFills,
    ) -> None:
        self._tiers = tiers
        self._lanes = lanes
        self._commits = commits
        self._datasets = datasets
        self._fillers = fillers
        self._checks = checks
        self._hole_records = hole_records
        self._handle = handle
        self._memory = memory
        self._shared = shared
        self.locate: Locate | None = None
        """Finds a node to fill from; None where there is no cluster."""
        self.wrong_copy: Callable[[str, ExtentId], None] = lambda node, extent: None
        """Called with a node that sent wrong bytes of an extent."""
        self._source_bytes: dict[DatasetId, int] = {}
        self._peer_bytes: dict[DatasetId, int] = {}
        self._filling: dict[_CopyKey, commands.StartFill] = {}
        self._paused: list[commands.StartFill] | None = None
        self.received_bytes = 0
        """Bytes of extents that came from other nodes, also for fills that failed."""
        self.receive_s = 0.0
        """The seconds that all reads from other nodes took. Some waited for blocks that those nodes did not have yet."""
        self.peer_reads = 0
        """Reads from other nodes that have ended, those that failed included."""
        self.peer_failures = 0
        """How often a node failed to give an extent."""
        self.failures: Counter[str] = Counter()
        """Failed fills by the name of the error, including those that were retried."""

    def pause(self) -> None:
        """Begin no fill until `resume`; new commands wait."""
        self._paused = self._paused or []

    def resume(self) -> None:
        """Begin the fills that waited."""
        waiting, self._paused = self._paused or [], None
        for command in waiting:
            self._begin(command)

    def source_bytes(self, dataset: DatasetId) -> int:
        """Bytes fetched from the source, including those fetched while the dataset was indexed."""
        return sum(self._source_bytes.get(each, 0) for each in (dataset, provisional_id(dataset)))

    def peer_bytes(self, dataset: DatasetId) -> int:
        """Bytes fetched from other nodes."""
        return self._peer_bytes.get(dataset, 0)

    @property
    def under_way(self) -> int:
        """The number of fills and commits that have begun."""
        waiting = sum(self._filling.get((each.extent, each.tier)) is each for each in self._paused or ())
        return len(self._filling) - waiting + len(self._checks.committing)

    def fail_tier(self, name: TierName, why: str) -> None:
        """Answer all fills into or from a tier as failed."""
        for command in [c for c in self._filling.values() if name in (c.tier, c.from_tier)]:
            code = TierFailed.code if command.tier == name else SourceUnavailable.code
            tier, extent = self._tiers[command.tier], command.extent
            del self._filling[(extent, command.tier)]
            self._lanes[command.tier].submit(partial(tier.abort, extent), lambda _: None, lambda _: None)
            self._failed(command, code, f"{name}: {why}", retry=True)

    def tier_lost(self, name: TierName, why: str) -> None:
        """Answer all fills and commits of a lost tier as failed."""
        self.fail_tier(name, why)
        committing = self._checks.committing
        for key in [key for key in committing if key[1] == name]:
            del committing[key]
            self._handle(events.CommitFailed(*key, f"{name}: {why}"))

    def start(self, command: commands.StartFill) -> None:
        """Begin a fill; `Filled` or `FillFailed` follows, and for a disk `Committed` or `CommitFailed`."""
        self._filling[(command.extent, command.tier)] = command
        if self._paused is None:
            self._begin(command)
        else:
            self._paused.append(command)

    def _begin(self, command: commands.StartFill) -> None:
        self._commits.when_below_limit(command.tier, partial(self._reserve, command))

    def _reserve(self, command: commands.StartFill) -> None:
        if self._filling.get((command.extent, command.tier)) is not command:
            return  # already answered: its tier was lost
        home = self._datasets.dataset_with(command.extent)
        assert home is not None, "a fill of an unclaimed extent"
        dataset, index = home
        size, tier = dataset.sizes[index], self._tiers[command.tier]
        self._lanes[command.tier].submit(
            lambda: tier.reserve(command.extent, size),
            lambda target: self._send_fill(command, dataset, index, target),
            lambda error: self._not_reserved(command, error),
        )

    def _not_reserved(self, command: commands.StartFill, error: CacheError) -> None:
        self._checks.suspect(command.tier, error)
        if _forget(self._filling, command, command):
            log.error("a tier refuses a fill", extra={"tier": command.tier, "error": str(error)})
            self._failed(command, error.code, str(error), retry=False)

    def _send_fill(
        self, command: commands.StartFill, dataset: ServedDataset, index: int, target: int
    ) -> None:
        if self._filling.get((command.extent, command.tier)) is not command:
            os.close(target)  # already answered: its tier was lost
            return
        # All readers may have left when the answer comes, and the dataset may be unloaded: keep its id and size only.
        filled = partial(self._filled, command, dataset.id, dataset.sizes[index])
        if command.from_tier is None:
            if self.locate is None or not dataset.sizes[index]:
                self._fetch(command, dataset, index, target, None)
            else:
                self._share(command, dataset, index, target)
            return

        tiers = command.tier, command.from_tier

        def opened(origin: int, checksums: Checksums | None) -> None:
            assert checksums is not None
            if self._filling.get((command.extent, command.tier)) is command:  # neither tier was lost
                digests = jobs.pack_digests(checksums.digests)
                copy = partial(jobs.CopyJob, size_bytes=checksums.size_bytes, digests=digests)
                self._fillers.submit(copy, (target, origin), filled, tiers)
            os.close(origin)
            os.close(target)

        def failed(error: CacheError) -> None:
            os.close(target)
            filled(jobs.JobDone(0, error.code, str(error), retry=True))

        self._checks.open(command.extent, command.from_tier, opened, failed)

    def _share(self, command: commands.StartFill, dataset: ServedDataset, index: int, target: int) -> None:
        """Let peers follow a fill, and look for a node to fill from."""
        try:
            fill = self._shared.begin(command.extent, command.tier, dataset.sizes[index], target)
        except OSError as error:
            os.close(target)
            message = f"a fill cannot be shared ({error.strerror}); allow more open files (LimitNOFILE=, ulimit -Hn)"
            self._filled(command, dataset.id, 0, jobs.JobDone(0, OutOfSpace.code, message))
            return
        os.close(target)
        self._seek(command, dataset, index, fill)

    def _seek(
        self, command: commands.StartFill, dataset: ServedDataset, index: int, fill: SharedFill
    ) -> None:
        """Ask the cluster where to read an extent, unless enough nodes have failed."""
        assert self.locate is not None, "no cluster"
        located = partial(self._located, command, dataset, index, fill)
        if len(fill.failed) < MAX_NODES and not fill.spoilt:
            self.locate(command.extent, fill.failed, located)
        else:
            located(Located("", ""))

    def _located(
        self,
        command: commands.StartFill,
        dataset: ServedDataset,
        index: int,
        fill: SharedFill,
        found: Located,
    ) -> None:
        if self._filling.get((command.extent, command.tier)) is not command:
            return  # already answered: its tier was lost
        if not found.node:
            self._fetch(command, dataset, index, fill.target, fill)
            return
        began = time.monotonic()
        pull = partial(
            jobs.PullJob, extent=command.extent.hex(), size_bytes=fill.size_bytes, address=found.address
        )

        def pulled(answer: jobs.Answer) -> None:
            assert isinstance(answer, jobs.JobDone)
            self.received_bytes += answer.peer_bytes
            self.receive_s += time.monotonic() - began
            self.peer_reads += 1
            current = self._filling.get((command.extent, command.tier)) is command
            if not current or answer.code in (0, OutOfSpace.code, TierFailed.code):
                self._filled(command, dataset.id, fill.size_bytes, answer)
                return
            self._count(dataset.id, answer)
            log.info("a peer did not give an extent", extra={"peer": found.node, "error": answer.message})
            if answer.code == CorruptData.code:
                self.wrong_copy(found.node, command.extent)
            self.peer_failures += 1
            fill.failed = (*fill.failed, found.node)
            self._seek(command, dataset, index, fill)

        self._fillers.submit(pull, (fill.target, fill.progress_fd), pulled, (command.tier,))

    def _fetch(
        self,
        command: commands.StartFill,
        dataset: ServedDataset,
        index: int,
        target: int,
        fill: SharedFill | None,
    ) -> None:
        """Fill from the source, once there is memory to decode it."""
        needed_bytes = memory_needed(dataset.catalog, dataset.sizes[index])
        send = partial(self._send_fetch, command, dataset, index, target, needed_bytes, fill)
        self._memory.begin(needed_bytes, send)

    def _send_fetch(
        self,
        command: commands.StartFill,
        dataset: ServedDataset,
        index: int,
        target: int,
        needed_bytes: int,
        fill: SharedFill | None,
    ) -> None:
        size_bytes = dataset.sizes[index]

        def filled(answer: jobs.Answer) -> None:
            self._memory.end(needed_bytes)
            if isinstance(answer, jobs.JobDone) and answer.crashed:
                uri = dataset.catalog.extent(index).pieces[0].object.uri
                message = f"a process crashed while it read {uri}; the object is probably damaged"
                answer = replace(answer, code=CorruptData.code, message=message)
            self._filled(command, dataset.id, size_bytes, answer)

        if self._filling.get((command.extent, command.tier)) is command:
            job = partial(jobs.FillJob, dataset=dataset.id, index=index, shared=fill is not None)
            progress = (fill.progress_fd,) if fill is not None else ()
            self._fillers.submit(job, (target, dataset.catalog_fd, *progress), filled, (command.tier,))
        else:  # already answered: its tier was lost
            self._memory.end(needed_bytes)
        if fill is None:  # otherwise the target is the fill's
            os.close(target)

    def _filled(
        self, command: commands.StartFill, dataset: DatasetId, size_bytes: int, answer: jobs.Answer
    ) -> None:
        assert isinstance(answer, jobs.JobDone)
        self._count(dataset, answer)
        if answer.code:
            self._fill_failed(command, answer)
            return
        if self._filling.get((command.extent, command.tier)) is not command:
            return  # already answered: its tier was lost
        checksums = Checksums(size_bytes, jobs.unpack_digests(answer.digests))
        tier, holes = self._tiers[command.tier], self._holes_of(command, answer)
        self._hole_records.filled(command.extent, command.tier, holes)
        if not isinstance(tier, PersistentTier):
            # RAM: a copy may be granted once it is sealed, which takes microseconds.
            self._lanes[command.tier].submit(
                lambda: tier.commit(command.extent, checksums),
                lambda _: self._ready(command, answer, holes),
                lambda error: self._abort(command, jobs.JobDone(0, error.code, str(error))),
            )
            return
        # NVMe: a copy may be granted once it is verified, before it is durable.
        self._checks.committing[(command.extent, command.tier)] = checksums
        self._ready(command, answer, holes)
        commit = tier.hold if holes.ranges else tier.commit
        self._commits.submit(
            command.extent,
            command.tier,
            lambda: commit(command.extent, checksums),
            lambda _: self._committed(command, checksums),
            lambda error: self._not_committed(command, checksums, error),
        )

    def _count(self, dataset: DatasetId, answer: jobs.JobDone) -> None:
        self._source_bytes[dataset] = self._source_bytes.get(dataset, 0) + answer.source_bytes
        self._peer_bytes[dataset] = self._peer_bytes.get(dataset, 0) + answer.peer_bytes

    def _holes_of(self, command: commands.StartFill, answer: jobs.JobDone) -> CopyHoles:
        """The holes that the fill reports, or those of the copy that it was filled from."""
        if command.from_tier is not None:
            return self._hole_records.of(command.extent, command.from_tier)
        if answer.holes:
            extra = {"extent": command.extent.hex(), "error": answer.message}
            log.warning("an extent was filled without some of its objects", extra=extra)
        return CopyHoles(answer.holes, answer.hole_code, answer.message)

    def _ready(self, command: commands.StartFill, answer: jobs.JobDone, holes: CopyHoles) -> None:
        if _forget(self._filling, command, command):
            self._shared.end(command.extent, command.tier, done=not holes.ranges)
            filled = events.Filled(command.extent, command.tier, answer.from_peer, holes.code, holes.message)
            self._handle(filled)

    def _committed(self, command: commands.StartFill, checksums: Checksums) -> None:
        if _forget(self._checks.committing, command, checksums):
            self._handle(events.Committed(command.extent, command.tier))

    def _not_committed(self, command: commands.StartFill, checksums: Checksums, error: CacheError) -> None:
        self._checks.suspect(command.tier, error)
        if _forget(self._checks.committing, command, checksums):
            log.warning("a commit failed", extra={"extent": command.extent.hex(), "error": str(error)})
            self.failures[type(error).__name__] += 1
            self._handle(events.CommitFailed(command.extent, command.tier, str(error), error.code))

    def _fill_failed(self, command: commands.StartFill, answer: jobs.JobDone) -> None:
        origin = command.from_tier
        if origin is None:
            if answer.code == TierFailed.code:
                self._checks.suspect(command.tier, TierFailed(answer.message))
        elif answer.code in (CorruptData.code, TierFailed.code):
            # The copy that was read is bad; the tier that the fill writes to did nothing wrong.
            self._checks.failed(command.extent, origin, answer.code)
            answer = jobs.JobDone(answer.number, SourceUnavailable.code, answer.message, retry=True)
        self._abort(command, answer)

    def _abort(self, command: commands.StartFill, answer: jobs.JobDone) -> None:
        def failed(_: object) -> None:
            if _forget(self._filling, command, command):
                self._failed(command, answer.code, answer.message, answer.retry)

        if self._filling.get((command.extent, command.tier)) is command:
            log.warning("a fill failed", extra={"extent": command.extent.hex(), "error": answer.message})
            self._lanes[command.tier].submit(
                partial(self._tiers[command.tier].abort, command.extent), failed, failed
            )

    def _failed(self, command: commands.StartFill, code: int, message: str, retry: bool) -> None:
        self._shared.end(command.extent, command.tier, done=False)
        self.failures[type(from_code(code, message)).__name__] += 1
        self._handle(events.FillFailed(command.extent, command.tier, code, message, retry))


def _forget(under_way: dict[_CopyKey, T], command: commands.StartFill, begun: T) -> bool:
    """Remove a fill or commit; False where it was already removed, because its tier was lost."""
    key = (command.extent, command.tier)
    if under_way.get(key) is not begun:
        return False
    del under_way[key]
    return True
