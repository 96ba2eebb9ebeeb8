"""One fill: reserve room in the tier, find where to read, fetch, and commit.

Bytes come from a lower tier, from another node, or from the source. A fill that other nodes may follow asks the cluster
where to read; where a place fails or is late, it keeps the blocks that came and asks again. The source is read whole.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import msgspec

from cachesvc.core import commands, events
from cachesvc.core.commands import StartFill
from cachesvc.core.errors import (
    CacheError,
    CorruptData,
    NotAllowed,
    NotFound,
    OutOfSpace,
    SourceUnavailable,
    TierFailed,
    from_code,
)
from cachesvc.core.model import ExtentId, TierName
from cachesvc.core.placement.directory import SOURCE
from cachesvc.core.placement.place_search import LateRead, PlaceSearch, ReadEnd
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.events.event import SOURCE_ERRORS, Event, failed, record
from cachesvc.daemon.fills.comparison import Comparison
from cachesvc.daemon.fills.fill_counts import FillCounts
from cachesvc.daemon.fills.fill_memory import memory_needed
from cachesvc.daemon.fills.fill_parts import FillParts
from cachesvc.daemon.fills.holes import CopyHoles
from cachesvc.daemon.fills.shared_fills import Located, SharedFill
from cachesvc.daemon.loop.steps import Step, Steps
from cachesvc.daemon.processes import jobs
from cachesvc.system.descriptors import closing_fd
from cachesvc.tiers.tier import Checksums, PersistentTier

log = logging.getLogger(__name__)
FROM_SOURCE = "source"
ELSEWHERE = (SourceUnavailable.code, NotAllowed.code)
"""Errors of the source that other nodes may not have: they are asked for the extent."""


class FillError(Exception):
    """A fill failed, and its room is to be freed. `failure` goes to the core."""

    def __init__(self, failure: CacheError, retry: bool) -> None:
        super().__init__(str(failure))
        self.failure, self.retry = failure, retry


class Fill:
    """The steps of one `StartFill`. The core hears of `Filled` or `FillFailed`, and for a disk of `Committed` or
    `CommitFailed`."""

    def __init__(self, command: commands.StartFill, parts: FillParts, counts: FillCounts) -> None:
        self.command = command
        self.filled = False
        """Its copy may be granted; what is left is to commit it."""
        self.began = time.monotonic()
        self.reads = ""
        """Where it reads now: "source", a tier or the name of a node; "" before it reads."""
        self._from_peer = False
        self._parts = parts
        self._counts = counts
        self._extent, self._tier_name = command.extent, command.tier
        self._tier = parts.tiers[command.tier]
        self._lane = parts.lanes[command.tier]

    def steps(self) -> Steps[None]:
        """Yield the steps from the first to the last."""
        commits = self._parts.commits
        yield Step(lambda then, _: commits.when_below_limit(self._tier_name, partial(then, None)))
        home = self._parts.datasets.dataset_with(self._extent)
        if home is None:  # of a reader that claims nothing
            yield self._tell_failed(NotFound("the dataset is not open any more; open it again"), retry=False)
            return
        dataset, index = home  # kept by the fill: all readers may leave, and the dataset be unloaded
        size_bytes = self.command.size_bytes or dataset.sizes[index]
        shrinks = dataset.uneven and self.command.from_tier is None
        reserve = partial(self._tier.reserve, self._extent, size_bytes, shrinks)
        try:
            target: int = yield Step(partial(self._lane.submit, reserve), os.close)
        except CacheError as error:
            self._parts.checks.suspect(self._tier_name, error)
            record_failure(error, self.command, dataset)
            yield self._tell_failed(error, retry=False)
            return
        try:
            with closing_fd(target), self._followed(dataset, index, target) as shared:
                done = yield from self._fetch(dataset, index, size_bytes, target, shared)
                if shrinks:
                    size_bytes = yield from self._shrunk(done.size_bytes)
                checksums, holes = Checksums(size_bytes, done.digests), self._holes_of(done)
                self._parts.hole_records.filled(self._extent, self._tier_name, holes)
                if not isinstance(self._tier, PersistentTier):
                    # RAM: a copy may be granted once it is sealed, which takes microseconds.
                    yield from self._seal(checksums, holes)
                if shared is not None:
                    shared.whole = not holes.ranges
        except FillError as error:
            record_failure(error.failure, self.command, dataset)
            yield self.abort()
            yield self._tell_failed(error.failure, error.retry)
            return
        self.filled = True
        record_filled(self.command, dataset, holes, self._parts.checks.repaired(self._extent))
        self._counts.filled(self.command, self._from_peer, size_bytes, time.monotonic() - self.began)
        takes = size_bytes if dataset.uneven else 0
        filled = events.Filled(
            self._extent, self._tier_name, self._from_peer, holes.code, holes.message, takes
        )
        if isinstance(self._tier, PersistentTier):
            # NVMe: a copy may be granted once it is verified, before it is durable.
            yield from self._commit(filled, checksums, self._committing(holes))
        else:
            yield self._tell(filled)

    def abort(self) -> Step[None]:
        """Free the room, after the calls under way. Errors are dropped: the tier finds what is left at its next start."""
        free = partial(self._tier.abort, self._extent)
        return Step(lambda then, _: self._lane.submit(free, then, lambda _: then(None)))

    def failed(self, failure: CacheError, retry: bool) -> events.Event:
        """The event of a fill or a commit that ends here."""
        self._counts.failures[type(failure).__name__] += 1
        if self.filled:
            return events.CommitFailed(self._extent, self._tier_name, str(failure), failure.code)
        return events.FillFailed(self._extent, self._tier_name, failure.code, str(failure), retry)

    def _tell(self, event: events.Event) -> Step[None]:
        """Give an event to the core, which may cancel this fill."""

        def begin(then: Callable[[None], None], _: object) -> None:
            self._parts.handle(event)
            then(None)

        return Step(begin)

    def _tell_failed(self, failure: CacheError, retry: bool) -> Step[None]:
        return self._tell(self.failed(failure, retry))

    @contextmanager
    def _followed(self, dataset: ServedDataset, index: int, target: int) -> Iterator[SharedFill | None]:
        """Let other nodes follow the fill while it goes on."""
        alone = self.command.from_tier is not None or dataset.source is not None
        if self._parts.locate is None or alone or not dataset.sizes[index]:
            yield None
            return
        try:
            fill = self._parts.shared.begin(self._extent, self._tier_name, dataset.sizes[index], target)
        except OSError as error:
            raise FillError(
                OutOfSpace(
                    f"a fill cannot be shared ({error.strerror}); allow more open files (LimitNOFILE=, ulimit -Hn)"
                ),
                retry=False,
            ) from error
        try:
            yield fill
        finally:
            self._parts.shared.end(fill)

    def _fetch(
        self, dataset: ServedDataset, index: int, most_bytes: int, target: int, shared: SharedFill | None
    ) -> Steps[jobs.JobDone]:
        """Fetch the bytes into the target, which has room for `most_bytes`, from the nearest place that gives them. Raises
        FillError."""
        if self.command.from_tier is not None:
            return (yield from self._from_tier(self.command.from_tier, dataset, target))
        if (preparer := self.command.preparer) is not None:
            make = partial(self._parts.preparers.make, preparer, index, most_bytes, target, dataset.uneven)
            done: jobs.JobDone = yield Step(lambda then, _: make(then))
        elif dataset.source is not None:
            done = yield from self._from_holder(dataset, index, target, most_bytes)
        elif shared is None:
            job = jobs.FetchJob(dataset.id, index, need=self.command.need)
            done = yield from self._from_source(dataset, job, target, None)
        else:
            done = yield from self._from_cluster(dataset, index, target, shared)
        if done.code == TierFailed.code:  # of the tier that it was written to
            self._parts.checks.suspect(self._tier_name, TierFailed(done.message))
        return _checked(done)

    def _from_tier(self, origin: TierName, dataset: ServedDataset, target: int) -> Steps[jobs.JobDone]:
        self.reads = origin
        try:
            fd, checksums = yield Step(
                lambda then, otherwise: self._parts.checks.open(
                    self._extent, origin, lambda *opened: then(opened), otherwise
                ),
                lambda opened: os.close(opened[0]),
            )
        except CacheError as error:
            done = jobs.JobDone(error.code, str(error), retry=True)
        else:
            assert checksums is not None, "a copy that is not committed"
            with closing_fd(fd):
                copy = jobs.CopyJob(checksums.size_bytes, checksums.digests)
                done = yield self._job(dataset, copy, (target, fd), (self._tier_name, origin))
        if done.code in (CorruptData.code, TierFailed.code):
            # The copy that was read is bad; the tier that the fill writes to did nothing wrong.
            self._parts.checks.failed(self._extent, origin, done.code)
            raise FillError(SourceUnavailable(done.message), retry=True)
        return _checked(done)

    def _from_cluster(
        self, dataset: ServedDataset, index: int, target: int, shared: SharedFill
    ) -> Steps[jobs.JobDone]:
        """Fetch from the nodes and the source, one after the other, as the extent's owner names them."""
        size_bytes, fills = dataset.sizes[index], self._parts.shared
        search = fills.search(self._extent, size_bytes)
        comparison = Comparison(
            shared,
            self._parts,
            lambda job, target, more_bytes: self._fetch_source(dataset, job, target, None, more_bytes),
        )
        refused: jobs.JobDone | None = None
        while True:
            found = Located()
            if not (search.exhausted or shared.complete):
                found = yield self._locate(search)
            if found.node == SOURCE and refused is not None:
                fills.note_source_failure(self._extent, refused.message)
                return refused
            self.reads = found.node or FROM_SOURCE
            if found.node == SOURCE and search.hedging:
                self._counts.hedged_bytes += size_bytes
            throttled, began = self._parts.fillers.source_requests.throttled, time.monotonic()
            patience = search.begin(found.node)
            job = jobs.FetchJob(dataset.id, index, found.address, True, patience, self.command.need)
            if found.node == SOURCE:
                done = yield from self._from_source(dataset, job, target, shared)
                now = time.monotonic()
            else:
                descriptors = (target, dataset.catalog_fd, shared.progress_fd)
                done = yield from self._from_node(dataset, job, descriptors, found.node)
                now = time.monotonic()
                done = yield from comparison.check(dataset, index, found, done)
            if done.code in (0, OutOfSpace.code, TierFailed.code):
                self._from_peer = found.node != SOURCE
                if not done.code:
                    came = (found.filling, done.peer_bytes, now - began, comparison.same)
                    self._parts.judged(search.gave(found.node, *came))
                    comparison.conclude(dataset, done.digests, self._from_peer)
                return done
            if done.end is ReadEnd.LATE:
                throttles = self._parts.fillers.source_requests.throttled > throttled
                throttles = throttles or self._parts.fillers.pays_for(self._uri(dataset, index))
                late = LateRead(now, found.filling, done.peer_bytes, throttles)
                search.late_at(found.node, done.message, late)
            elif found.node != SOURCE or done.code in ELSEWHERE:
                self._parts.judged(search.failed_at(found.node, done.message, done.end or ReadEnd.LACKS))
                if found.node == SOURCE:
                    # At the next try one of the nodes that follow this fill reads the source itself.
                    refused = msgspec.structs.replace(done, retry=True)
            else:
                return done

    def _from_holder(
        self, dataset: ServedDataset, index: int, target: int, most_bytes: int
    ) -> Steps[jobs.JobDone]:
        """Fetch prepared bytes from a node that has all of them. Where that fails, they are prepared here."""
        search = self._parts.shared.search(self._extent, dataset.sizes[index])
        found: Located = yield self._locate(search)
        if found.node == SOURCE or found.filling:
            return jobs.JobDone(NotFound.code, "no other node has these prepared samples any more")
        self.reads, began = found.node, time.monotonic()
        patience, most_bytes = search.begin(found.node), most_bytes if dataset.uneven else 0
        job = jobs.FetchJob(dataset.id, index, found.address, False, patience, self.command.need, most_bytes)
        done = yield from self._from_node(dataset, job, (target, dataset.catalog_fd), found.node)
        if not done.code:
            self._from_peer = True
            self._parts.judged(search.gave(found.node, False, done.peer_bytes, time.monotonic() - began))
        elif done.code not in (OutOfSpace.code, TierFailed.code):
            self._parts.judged(search.failed_at(found.node, done.message, done.end or ReadEnd.LACKS))
        return done

    def _uri(self, dataset: ServedDataset, index: int) -> str:
        return dataset.catalog.extent(index).pieces[0].object.uri

    def _locate(self, search: PlaceSearch) -> Step[Located]:
        locate = self._parts.locate
        assert locate is not None, "no cluster"
        return Step(lambda then, _: locate(self._extent, tuple(search.failed), tuple(search.late), then))

    def _from_node(
        self, dataset: ServedDataset, job: jobs.FetchJob, descriptors: tuple[int, ...], node: str
    ) -> Steps[jobs.JobDone]:
        counted = partial(self._counts.read_from, node, time.monotonic())
        done: jobs.JobDone = yield self._job(dataset, job, descriptors, (self._tier_name,), counted)
        if done.code not in (0, OutOfSpace.code, TierFailed.code):
            log.info("a peer did not give an extent", extra={"peer": node, "error": done.message})
            self._counts.peer_failures += 1
        return done

    def _from_source(
        self, dataset: ServedDataset, job: jobs.FetchJob, target: int, shared: SharedFill | None
    ) -> Steps[jobs.JobDone]:
        """Fetch from the source. Raises FillError where the process crashed."""
        done = yield from self._fetch_source(dataset, job, target, shared)
        if done.crashed:
            uri = self._uri(dataset, job.index)
            raise FillError(
                CorruptData(f"a process crashed while it read {uri}; the object is probably damaged"),
                retry=done.retry,
            )
        return done

    def _fetch_source(
        self,
        dataset: ServedDataset,
        job: jobs.FetchJob,
        target: int,
        shared: SharedFill | None,
        more_bytes: int = 0,
    ) -> Steps[jobs.JobDone]:
        """Fetch from the source, once there is memory to decode it and `more_bytes`."""
        self.reads = FROM_SOURCE
        size_bytes, memory, hedges = dataset.sizes[job.index], self._parts.memory, self._parts.shared.hedges
        needed_bytes = memory_needed(dataset.catalog, size_bytes) + more_bytes
        yield Step(
            lambda then, _: memory.begin(needed_bytes, partial(then, None)),
            lambda _: memory.end(needed_bytes),
        )

        def ended(done: jobs.JobDone) -> None:
            memory.end(needed_bytes)
            hedges.ended(self._extent, not done.code, time.monotonic())

        hedges.began(self._extent, time.monotonic())
        progress = (shared.progress_fd,) if shared is not None else ()
        descriptors = (target, dataset.catalog_fd, *progress)
        done: jobs.JobDone = yield self._job(dataset, job, descriptors, (self._tier_name,), ended)
        return done

    def _job(
        self,
        dataset: ServedDataset,
        job: jobs.Job,
        descriptors: tuple[int, ...],
        tiers: tuple[TierName, ...],
        ended: Callable[[jobs.JobDone], None] = lambda _: None,
    ) -> Step[jobs.JobDone]:
        """Run a job of a filler. It is counted when it ends, also after the fill was cancelled."""

        def begin(then: Callable[[jobs.JobDone], None], _: object) -> None:
            def answered(answer: jobs.Answer) -> None:
                assert isinstance(answer, jobs.JobDone)
                self._counts.fetched(dataset.id, answer)
                ended(answer)
                then(answer)

            self._parts.fillers.submit(job, descriptors, answered, tiers)

        return Step(begin)

    def _holes_of(self, done: jobs.JobDone) -> CopyHoles:
        """The holes that the fill reports, or those of the copy that it was filled from."""
        if self.command.from_tier is not None:
            return self._parts.hole_records.of(self._extent, self.command.from_tier)
        return CopyHoles(done.holes, done.hole_code, done.message)

    def _committing(self, holes: CopyHoles) -> Callable[[ExtentId, Checksums], None]:
        """Return the call that makes the copy permanent. A copy with holes ends with this daemon: the next one fetches it
        again."""
        return self._tier.hold if holes.ranges else self._tier.commit

    def _shrunk(self, size_bytes: int) -> Steps[int]:
        """Give back what the preparer did not need, and return the size."""
        shrink = partial(self._tier.shrink, self._extent, size_bytes)
        try:
            yield Step(partial(self._lane.submit, shrink))
        except CacheError as error:
            raise FillError(error, retry=False) from error
        return size_bytes

    def _seal(self, checksums: Checksums, holes: CopyHoles) -> Steps[None]:
        commit = self._committing(holes)
        try:
            yield Step(partial(self._lane.submit, lambda: commit(self._extent, checksums)))
        except CacheError as error:
            raise FillError(error, retry=False) from error

    def _commit(
        self, filled: events.Filled, checksums: Checksums, commit: Callable[[ExtentId, Checksums], None]
    ) -> Steps[None]:
        key, committing = (self._extent, self._tier_name), self._parts.checks.committing
        committing[key] = checksums
        result: events.Event = events.Committed(*key)
        try:
            yield self._tell(filled)
            yield Step(partial(self._parts.commits.submit, *key, lambda: commit(self._extent, checksums)))
        except CacheError as error:
            self._parts.checks.suspect(self._tier_name, error)
            log.warning("a commit failed", extra={"extent": self._extent.hex(), "error": str(error)})
            result = self.failed(error, retry=False)
        finally:
            if current := committing.get(key) is checksums:  # else the copy was evicted, and filled again
                del committing[key]
        if current:
            yield self._tell(result)


def _checked(done: jobs.JobDone) -> jobs.JobDone:
    """Return a job's result. Raises FillError where it failed."""
    if done.code:
        raise FillError(from_code(done.code, done.message), done.retry)
    return done


def record_failure(error: CacheError, command: StartFill, dataset: ServedDataset) -> None:
    """Record that a fill failed, or left out objects. Prepared samples do not come from a source."""
    of_source = isinstance(error, SOURCE_ERRORS) and dataset.source is None
    kind = "source_failed" if of_source else "fill_failed"
    record(failed(kind, error, **_about(command, dataset)))


def record_filled(command: StartFill, dataset: ServedDataset, holes: CopyHoles, repairs: bool) -> None:
    """Record a fill that left out objects, or that repairs a damaged copy; others are no events."""
    if holes.ranges:
        record_failure(from_code(holes.code, holes.message), command, dataset)
    elif repairs:
        record(Event("repaired", **_about(command, dataset)))


def _about(command: StartFill, dataset: ServedDataset) -> dict[str, Any]:
    return {
        "uri": dataset.catalog.uri,
        "dataset": dataset.id,
        "extent": command.extent.hex(),
        "tier": command.tier,
        "size_bytes": dataset.sizes[dataset.index_of[command.extent]],
    }
