"""The only place where core meets IO: events in, commands out, executed on tiers, fillers and sockets."""

from __future__ import annotations

import errno
import itertools
import logging
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from cachesvc.core import events
from cachesvc.core.errors import CacheError, CorruptData, NotFound
from cachesvc.core.events import Command, Event
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node import Node
from cachesvc.daemon import jobs
from cachesvc.daemon.datasets import Dataset, Datasets
from cachesvc.daemon.fillers import Fillers
from cachesvc.daemon.grants import GrantsServer, Known
from cachesvc.daemon.loop import Loop
from cachesvc.tiers.failures import tier_error
from cachesvc.tiers.tier import Checksums, Tier

log = logging.getLogger(__name__)
VERIFY_TRIES = 3


class Runner:
    """Executes what `Node.handle` commands. Everything runs on the loop's thread, except tier calls that may
    wait for a disk: each tier has one thread of its own, so a slow disk delays only itself."""

    def __init__(
        self,
        node: Node,
        tiers: list[Tier],
        datasets: Datasets,
        fillers: Fillers,
        loop: Loop,
        clock: Callable[[], float],
    ) -> None:
        self.node = node
        self.datasets = datasets
        self.loop = loop
        self.grants: GrantsServer | None = None
        self.source_bytes: dict[DatasetId, int] = {}
        self._unverified: set[tuple[ExtentId, TierName]] = set()
        self._tiers = {tier.name: tier for tier in tiers}
        self._threads = {t.name: ThreadPoolExecutor(1, thread_name_prefix=f"tier-{t.name}") for t in tiers}
        self._fillers = fillers
        self._clock = clock
        self._ids = itertools.count(1)
        self._execute: dict[type[Command], Callable[..., None]] = {
            events.StartFill: self._start_fill,
            events.Grant: self._grant,
            events.Refuse: self._refuse,
            events.Fail: self._fail,
            events.Evict: self._evict,
        }

    def next_id(self) -> int:
        """A number for a job, reader or plan, never used before."""
        return next(self._ids)

    def handle(self, event: Event) -> None:
        """Give an event to the core and carry out its commands."""
        for command in self.node.handle(event, self._clock()):
            self._execute[type(command)](command)

    def recovered(self, event: events.Recovered) -> None:
        """What a tier held at start; each extent is verified before its first grant."""
        self._unverified.update((extent, event.tier) for extent, _ in event.extents)
        self.handle(event)

    def tick(self) -> None:
        """What the loop calls at the core's deadline."""
        self.handle(events.Tick())

    def declare(self, job: int, dataset: Dataset) -> None:
        """A job claims a dataset."""
        self.handle(events.DatasetDeclared(job, dataset.id, dataset.extents))

    def build(self, job: Callable[[int], jobs.Build], answered: Callable[[jobs.Answer], None]) -> None:
        """Resolve URIs in the builder process; `answered` runs on the loop's thread for every answer."""
        self._fillers.submit(job, (), answered)

    def resident(self, dataset: Dataset) -> list[tuple[ExtentId, TierName]]:
        """A dataset's extents that could be granted now, and from which tier."""
        found = ((extent, self.node.where(extent)) for extent in dataset.extent_ids)
        return [(extent, tier) for extent, tier in found if tier is not None]

    def resident_bytes(self, dataset: Dataset) -> int:
        """Bytes of those."""
        return sum(dataset.sizes[dataset.index_of[extent]] for extent, _ in self.resident(dataset))

    def open(self, extent: ExtentId) -> tuple[int, Checksums]:
        """A descriptor (the caller closes it) and the checksums of a resident extent of an open dataset: what
        a wider allowlist once brought here is nobody's. Raises NotFound, TierFailed."""
        tier = self.node.where(extent) if self.datasets.has(extent) else None
        fd, checksums = self._tiers[tier].open(extent) if tier else (-1, None)
        if checksums is None:
            if fd >= 0:
                os.close(fd)
            raise NotFound(f"extent {extent.hex()} is not resident here")
        return fd, checksums

    def verify(
        self, extent: ExtentId, tier: TierName, done: Callable[[bool], None], tries: int = VERIFY_TRIES
    ) -> None:
        """Check one resident extent against its checksums; a corrupt copy is dropped, and so is one whose
        check ends its process every time."""
        try:
            fd, checksums = self._tiers[tier].open(extent)
        except CacheError:
            done(False)
            return
        if checksums is None:
            os.close(fd)
            done(True)
            return
        job = partial(
            jobs.Verify, size_bytes=checksums.size_bytes, digests=jobs.pack_digests(checksums.digests)
        )

        def answered(answer: jobs.Answer) -> None:
            assert isinstance(answer, jobs.Done)
            if answer.retry and tries > 1:  # the process ended, which says nothing about the bytes
                self.verify(extent, tier, done, tries - 1)
                return
            if answer.code:
                log.error("a corrupt extent is dropped", extra={"extent": extent.hex(), "tier": tier})
                self.handle(events.Corrupt(extent, tier))
            done(answer.code == 0)

        self._fillers.submit(job, (fd,), answered)
        os.close(fd)

    def close(self) -> None:
        """Finish what the tiers' threads are doing, not what they were to do next, and close the tiers."""
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
        for tier in self._tiers.values():
            try:
                tier.close()
            except CacheError as error:
                log.warning("a tier did not close cleanly", extra={"tier": tier.name, "error": str(error)})

    # What readers say (grants.Answers).

    def connected(
        self, reader: ReaderId, dataset: DatasetId, then: Callable[[Known | CacheError], None]
    ) -> None:
        """Load a dataset off the loop, declare it in the reader's name, and say so."""

        def loaded(future: Future[Dataset]) -> None:
            if self.grants is None or not self.grants.here(reader):
                return  # gone meanwhile: a claim in its name would never end
            error = future.exception()
            if error is None:
                known = self.datasets.admit(future.result())
                self.declare(reader, known)
                then(known)
            elif isinstance(error, CacheError):
                then(error)
            else:
                log.error("a catalog cannot be loaded", extra={"dataset": dataset, "error": str(error)})
                then(CacheError(f"the catalog of dataset {dataset} cannot be loaded: {error}"))

        self.datasets.load(dataset).add_done_callback(lambda f: self.loop.post(lambda: loaded(f)))

    def demanded(self, reader: ReaderId, request: int, extent: ExtentId) -> None:
        """GET."""
        self.handle(events.Demanded(reader, request, extent))

    def released(self, reader: ReaderId, extent: ExtentId) -> None:
        """RELEASE."""
        self.handle(events.Released(reader, extent))

    def held(self, reader: ReaderId, extent: ExtentId, tier: str) -> None:
        """HOLD. A file costs no memory, but its release comes as one of what was held, all the same."""
        dataset, index = self.datasets.home(extent)
        size_bytes = dataset.sizes[index] if tier == RAM else 0
        self.handle(events.Held(reader, extent, size_bytes))

    def passed_or_gone(self, reader: ReaderId, step: int | None) -> None:
        """PASSED, or the end of a reader: of its leases, its plan and its claim, in this order."""
        if step is not None:
            self.handle(events.Passed(reader, step))
            return
        self.handle(events.ReaderGone(reader))
        self.handle(events.PlanEnded(reader))
        self.handle(events.JobEnded(reader))

    # What the core commands.

    def _grant(self, command: events.Grant) -> None:
        if (command.extent, command.tier) in self._unverified:
            self._grant_verified(command)
        else:
            self._send_grant(command)

    def _grant_verified(self, command: events.Grant) -> None:
        """After a restart the disk may have changed what it holds: check before the first grant."""

        def checked(good: bool) -> None:
            self._unverified.discard((command.extent, command.tier))
            if good:
                self._send_grant(command)
            else:
                self.handle(events.Released(command.reader, command.extent))
                self.handle(events.Demanded(command.reader, command.request, command.extent))

        self.verify(command.extent, command.tier, checked)

    def _send_grant(self, command: events.Grant) -> None:
        assert self.grants is not None
        try:
            fd, _ = self._tiers[command.tier].open(command.extent)
        except CacheError as error:
            log.error("a resident extent cannot be opened", extra={"error": str(error), "tier": command.tier})
            if not _short_of_descriptors(error):
                self.handle(events.Corrupt(command.extent, command.tier))
            self.handle(events.Released(command.reader, command.extent))
            self.grants.refuse(command.reader, command.request, command.extent)
            return
        dataset, index = self.datasets.home(command.extent)
        size = dataset.sizes[index]
        kept = self.node.keeps(command.extent, command.tier)
        self.grants.grant(command.reader, command.request, command.extent, command.tier, kept, size, fd)
        os.close(fd)

    def _refuse(self, command: events.Refuse) -> None:
        assert self.grants is not None
        self.grants.refuse(command.reader, command.request, command.extent)

    def _fail(self, command: events.Fail) -> None:
        assert self.grants is not None
        self.grants.fail(command.reader, command.request, command.extent, command.code, command.message)

    def _evict(self, command: events.Evict) -> None:
        def evict() -> None:
            try:
                self._tiers[command.tier].evict(command.extent)
            except CacheError as error:  # the copy is forgotten either way; start-up cleans the disk
                log.warning("an eviction failed", extra={"tier": command.tier, "error": str(error)})

        def evicted(_: None) -> None:
            self._unverified.discard((command.extent, command.tier))
            self.handle(events.Evicted(command.extent, command.tier))

        self._on_tier(command.tier, evict, evicted)

    def _start_fill(self, command: events.StartFill) -> None:
        dataset, index = self.datasets.home(command.extent)
        size = dataset.sizes[index]
        reserve = partial(self._tiers[command.tier].reserve, command.extent, size)
        self._on_tier(
            command.tier,
            reserve,
            lambda target: self._send_fill(command, dataset, index, target),
            lambda error: self._not_reserved(command, error),
        )

    def _not_reserved(self, command: events.StartFill, error: CacheError) -> None:
        log.error("a tier takes no more for a while", extra={"tier": command.tier, "error": str(error)})
        self.handle(events.FillFailed(command.extent, command.tier, error.code, str(error), False))

    def _send_fill(self, command: events.StartFill, dataset: Dataset, index: int, target: int) -> None:
        try:
            if command.from_tier is None:
                job: Callable[[int], jobs.Job] = partial(jobs.Fill, dataset=dataset.id, index=index)
                self._fillers.submit(job, (target, dataset.catalog_fd), partial(self._filled, command))
                return
            origin, checksums = self._tiers[command.from_tier].open(command.extent)
            assert checksums is not None
            digests = jobs.pack_digests(checksums.digests)
            job = partial(jobs.Copy, size_bytes=checksums.size_bytes, digests=digests)
            self._fillers.submit(job, (target, origin), partial(self._filled, command))
            os.close(origin)
        except CacheError as error:
            self._abort(command, jobs.Done(0, error.code, str(error), retry=True))
        finally:
            os.close(target)

    def _filled(self, command: events.StartFill, answer: jobs.Answer) -> None:
        assert isinstance(answer, jobs.Done)
        dataset, index = self.datasets.home(command.extent)
        if command.from_tier is None:
            so_far = self.source_bytes.get(dataset.id, 0)
            self.source_bytes[dataset.id] = so_far + answer.source_bytes
        if answer.code:
            self._abort(command, answer)
            if command.from_tier is not None and answer.code == CorruptData.code:
                self.handle(events.Corrupt(command.extent, command.from_tier))
            return
        checksums = Checksums(dataset.sizes[index], jobs.unpack_digests(answer.digests))
        tier = self._tiers[command.tier]
        if getattr(tier, "recover", None) is None:
            # RAM: sealing is what makes it safe to grant, and takes microseconds.
            self._on_tier(
                command.tier,
                lambda: tier.commit(command.extent, checksums),
                lambda _: self.handle(events.Filled(command.extent, command.tier)),
                lambda error: self._abort(command, jobs.Done(0, error.code, str(error))),
            )
            return
        # NVMe: readers wait for verified bytes, not for durability.
        self.handle(events.Filled(command.extent, command.tier))
        self._on_tier(
            command.tier,
            lambda: tier.commit(command.extent, checksums),
            lambda _: self.handle(events.Committed(command.extent, command.tier)),
            lambda error: self.handle(events.CommitFailed(command.extent, command.tier, str(error))),
        )

    def _abort(self, command: events.StartFill, answer: jobs.Done) -> None:
        log.warning("a fill failed", extra={"extent": command.extent.hex(), "error": answer.message})

        def failed(_: None) -> None:
            self.handle(
                events.FillFailed(command.extent, command.tier, answer.code, answer.message, answer.retry)
            )

        self._on_tier(command.tier, lambda: self._tiers[command.tier].abort(command.extent), failed)

    def _on_tier(
        self,
        tier: TierName,
        work: Callable[[], object],
        then: Callable[..., None],
        otherwise: Callable[[CacheError], None] | None = None,
    ) -> None:
        """Run `work` on the tier's thread, then continue on the loop's."""

        def finished(future: Future[object]) -> None:
            if future.cancelled():
                return  # the daemon is stopping
            error = future.exception()
            if isinstance(error, OSError) and not isinstance(error, CacheError):
                error = tier_error(error, tier, "do what it was asked")
            if error is None:
                self.loop.post(lambda: then(future.result()))
            elif otherwise is not None and isinstance(error, CacheError):
                self.loop.post(lambda: otherwise(error))
            else:
                self.loop.post(lambda: _raise(error))

        self._threads[tier].submit(work).add_done_callback(finished)


def _short_of_descriptors(error: CacheError) -> bool:
    """Our own limits, which say nothing about the copy."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _raise(error: BaseException) -> None:
    raise error
