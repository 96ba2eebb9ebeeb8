"""Implements the gRPC service: translates requests into calls on the runner, and typed errors into statuses."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial

import grpc

from cachesvc.catalog.options import Options
from cachesvc.config import Settings
from cachesvc.core import errors, events
from cachesvc.core.model import DatasetId, ExtentId, TierName
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.tenants import ANONYMOUS, Peer, Tenants, admits, token_of
from cachesvc.daemon.control.cluster_progress import ClusterProgress
from cachesvc.daemon.control.messages import dataset_message, options_of, stale_text
from cachesvc.daemon.control.pins import Pins
from cachesvc.daemon.control.progress import progress_of
from cachesvc.daemon.control.reports import Reports
from cachesvc.daemon.control.statuses import errors_as_statuses
from cachesvc.daemon.datasets import ServedDataset, check_share, unknown
from cachesvc.daemon.fills.build_queue import BuildRequest
from cachesvc.daemon.fills.checks import CheckResult
from cachesvc.daemon.loop.waiting import CallWaits
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.runner import Runner
from cachesvc.sources.near_names import allowed_hint
from cachesvc.v1 import cachesvc_pb2 as pb

log = logging.getLogger(__name__)
PROGRESS_S = 0.2
FREED_S = 10.0
"""How long an eviction waits for disks: before it for commits, since a committing extent is not evicted, and after it
until the bytes are free, since the next fill is placed by free bytes."""
CHECKS_UNAVAILABLE = (
    "nothing can be checked now: open files (LimitNOFILE=, ulimit -Hn), memory or processes are short, or a mount hangs;"
    " the daemon's log says which"
)
EVICTED = "the dataset was evicted while it was filled; run prefetch again"
MAX_NOTES = 1000
"""Notes of one dataset in a reply: the CLI prints 8, and a message has its limit."""
MAX_URIS = 100_000


class Service:
    """Methods run on gRPC's threads. They reach the core only through the loop."""

    def __init__(
        self,
        runner: Runner,
        pins: Pins,
        settings: Settings,
        tenants: Tenants,
        lookups: Lookups,
        started: float,
    ) -> None:
        self._runner = runner
        self._pins = pins
        self._loop = runner.loop
        self._waiting = CallWaits(runner.loop)
        self._reports = Reports(runner, pins, started)
        self._settings = settings
        self._tenants = tenants
        self._lookups = lookups

    def OpenDataset(
        self, request: pb.OpenDatasetRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.OpenDatasetReply]:
        with errors_as_statuses(context):
            uris = self._canonical(request.uris, self._caller(context))
            options = options_of(request.options, self._settings)
            answers: queue.Queue[jobs.Answer] = queue.Queue()
            opening = self._open(uris, options, request, self._uid(context), answers)
            try:
                while isinstance(answer := self._waiting.next(answers, context), jobs.BuildProgress):
                    yield pb.OpenDatasetReply(indexed_bytes=answer.done_bytes, total_bytes=answer.total_bytes)
            finally:
                self._loop.post(lambda: self._runner.builds.cancel(opening, answers.put))
            self._runner.datasets.tidy(self._pins.stored)  # also after a build that found no room
            if answer.code:
                raise errors.from_code(answer.code, self._without_secret_names(answer.message, context))
            if request.version and request.version != answer.dataset:
                own = (
                    ""
                    if request.options.extent_bytes
                    else f" (with extents of {options.extent_bytes:,} bytes, this daemon's: extent_bytes= gives others)"
                )
                raise errors.SourceChanged(
                    f"the data at {uris[0]} is version {answer.dataset}{own}, not {request.version}; open it "
                    "without version= to go on with what is there"
                )
            dataset = self._dataset(answer.dataset, context)
            self._loop.call(partial(self._runner.datasets.note_opening, dataset.id, answer.listed_at))
            stale = stale_text(dataset, answer.listed_at, answer.message) if answer.listed_at else ""
            if stale:
                log.warning("%s", stale)
            self._loop.call(lambda: self._runner.refill_holes(dataset))
            yield pb.OpenDatasetReply(
                dataset=dataset_message(dataset),
                notes=dataset.catalog.notes[:MAX_NOTES],
                stale=stale,
                kept=[dataset.id, *answer.before] if stale else [],
            )

    def Prefetch(
        self, request: pb.PrefetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PrefetchReply]:
        with errors_as_statuses(context):
            dataset = self._dataset(request.dataset, context)
            job, user = self._runner.next_id(), self._uid(context)
            self._check_share(dataset, user)
            try:
                self._loop.call(lambda: self._runner.declare(job, dataset, user, gradual=True))
                self._after(self._runner.node.claims.claimed, dataset, context)
                if not request.dry_run:
                    self._loop.call(lambda: self._runner.refill_holes(dataset))
                    self._loop.call(lambda: self._runner.handle(events.Prefetched(job, dataset.id)))
                yield from self._progressing(job, dataset, request.dry_run, context)
            finally:
                self._loop.post(lambda: self._runner.handle(events.JobEnded(job)))

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        with errors_as_statuses(context):
            reply = self._reports.daemon()
            caller = self._caller(context)
            reply.allow.extend(self._tenants.prefixes(caller))
            reply.datasets.extend(self._reports.datasets(caller))
            return reply

    def List(self, request: pb.ListRequest, context: grpc.ServicerContext) -> pb.ListReply:
        with errors_as_statuses(context):
            return pb.ListReply(datasets=self._reports.datasets(self._caller(context)))

    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinReply:
        with errors_as_statuses(context):
            dataset = self._dataset(request.dataset, context)
            pinned: queue.Queue[None] = queue.Queue()
            user = self._uid(context)
            if request.pinned:
                self._check_share(dataset, user)
            self._pins.pin(dataset, request.pinned, user, partial(pinned.put, None))
            self._waiting.next(pinned, context)
            return pb.PinReply()

    def Evict(self, request: pb.EvictRequest, context: grpc.ServicerContext) -> pb.EvictReply:
        with errors_as_statuses(context):
            dataset = self._dataset(request.dataset, context)
            self._after_tiers(context)
            # A walk over extents reads only and is too long for the loop, so it runs on this thread.
            before = {extent for extent, _ in self._runner.resident(dataset)}
            self._loop.call(lambda: self._runner.handle(events.EvictAsked(dataset.id, dataset.extent_ids)))
            self._after(self._runner.node.claims.evicted, dataset, context)
            self._after_tiers(context)
            stayed = (extent for extent, _ in self._runner.resident(dataset) if extent in before)
            busy_bytes = dataset.bytes_of(stayed)
            return pb.EvictReply(
                evicted_bytes=dataset.bytes_of(before) - busy_bytes,
                busy_bytes=busy_bytes,
                lost_bytes=dataset.bytes_of(self._runner.out_of_reach(dataset)),
            )

    def Verify(self, request: pb.VerifyRequest, context: grpc.ServicerContext) -> Iterator[pb.VerifyReply]:
        with errors_as_statuses(context):
            dataset = self._dataset(request.dataset, context)
            resident = self._runner.resident(dataset)  # reads only, and takes too long for the loop
            corrupt = 0
            for checked, (extent, tier) in enumerate(resident, start=1):
                corrupt += not self._verify(extent, tier, context)
                yield pb.VerifyReply(checked_extents=checked, extents=len(resident), corrupt_extents=corrupt)
            yield pb.VerifyReply(
                checked_extents=len(resident), extents=len(resident), corrupt_extents=corrupt, done=True
            )

    def _caller(self, context: grpc.ServicerContext) -> Peer | None:
        """Return the user of the grants connection that the call names; None where it names no live one."""
        token = token_of(context.invocation_metadata())
        assert self._runner.grants is not None
        return None if token is None else self._runner.grants.caller(token)

    def Nodes(self, request: pb.NodesRequest, context: grpc.ServicerContext) -> pb.NodesReply:
        return self._reports.nodes()

    def _check_share(self, dataset: ServedDataset, user: int) -> None:
        """Raise OutOfSpace where the user claims too many extents."""
        self._loop.call(lambda: check_share(self._runner.node, dataset, user))

    def _uid(self, context: grpc.ServicerContext) -> int:
        caller = self._caller(context)
        return caller.uid if caller else ANONYMOUS

    def _canonical(self, uris: Sequence[str], caller: Peer | None) -> list[str]:
        if not uris or len(uris) > MAX_URIS:
            raise errors.InvalidInput(f"{len(uris)} URIs; give 1 to {MAX_URIS:,}")
        return self._lookups.run(lambda: [self._tenants.check(uri, caller) for uri in uris], uris[0])

    def _without_secret_names(self, message: str, context: grpc.ServicerContext) -> str:
        """Return an error's message without a name that this caller may not learn."""
        caller = self._caller(context)

        def allowed(uri: str) -> bool:
            with suppress(errors.CacheError):
                return bool(self._canonical([uri], caller))
            return False

        return allowed_hint(message, allowed)

    def _dataset(self, wanted: str, context: grpc.ServicerContext) -> ServedDataset:
        loaded = self._runner.datasets.load(DatasetId(wanted)).result()
        if not admits(loaded.rules, self._caller(context)):
            raise unknown(DatasetId(wanted))
        return self._loop.call(lambda: self._runner.datasets.admit(loaded))

    def _open(
        self,
        uris: list[str],
        options: Options,
        request: pb.OpenDatasetRequest,
        user: int,
        answers: queue.Queue[jobs.Answer],
    ) -> BuildRequest:
        job = jobs.BuildJob(uris, options, self._runner.datasets.directory, request.refresh, request.version)
        asked = (tuple(uris), options, request.refresh, request.version)
        return self._loop.call(lambda: self._runner.builds.submit(user, asked, job, answers.put))

    def _progressing(
        self, job: int, dataset: ServedDataset, dry_run: bool, context: grpc.ServicerContext
    ) -> Iterator[pb.PrefetchReply]:
        """Yield the progress of a prefetch until it is done, or once for a dry run. Raises CacheError when an eviction ends
        it."""
        elsewhere = ClusterProgress(self._runner, job, dataset, self._waiting)
        while True:
            reply = self._loop.call(lambda: progress_of(self._runner, job, dataset, dry_run))
            if not dry_run:
                elsewhere.add(reply, context)
            yield reply
            if reply.done or not context.is_active():
                return
            if not self._loop.call(lambda: self._runner.node.claims.prefetching(job)):
                raise errors.CacheError(EVICTED)
            time.sleep(PROGRESS_S)

    def _verify(self, extent: ExtentId, tier: TierName, context: grpc.ServicerContext) -> bool:
        answers: queue.Queue[CheckResult] = queue.Queue()
        user = self._uid(context)

        def ask() -> None:
            if self._runner.node.where(extent) == tier:
                self._runner.checks.verify(extent, tier, answers.put, user)
            else:
                answers.put(True)  # evicted or moved since the listing: no corrupt copy is left

        self._loop.call(ask)
        good = self._waiting.next(answers, context)
        if good is None:
            raise errors.DaemonUnavailable(CHECKS_UNAVAILABLE)
        return good

    def _after(
        self, done: Callable[[DatasetId], bool], dataset: ServedDataset, context: grpc.ServicerContext
    ) -> None:
        self._waiting.until(lambda then: self._runner.after(done, dataset.id, then), context)

    def _after_tiers(self, context: grpc.ServicerContext) -> None:
        with suppress(queue.Empty):  # a hung disk is lost later, or answers again
            self._waiting.until(self._runner.after_tiers, context, FREED_S)
