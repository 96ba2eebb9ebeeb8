"""The gRPC service: translates requests into calls on the runner and typed errors into statuses."""

from __future__ import annotations

import math
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from functools import partial
from itertools import chain
from typing import TypeVar

import grpc

import cachesvc
from cachesvc.catalog.build import Options
from cachesvc.config import Settings
from cachesvc.core import errors, events
from cachesvc.core.model import DatasetId, ExtentId, ReaderId, TierName
from cachesvc.daemon import jobs
from cachesvc.daemon.builds import Opening
from cachesvc.daemon.checks import Good
from cachesvc.daemon.datasets import Dataset, unknown
from cachesvc.daemon.grants import Known
from cachesvc.daemon.lookups import Lookups
from cachesvc.daemon.messages import described, options_of
from cachesvc.daemon.pins import Pins
from cachesvc.daemon.plans import Plan, entries_of, following_of
from cachesvc.daemon.runner import Runner
from cachesvc.daemon.statuses import statuses
from cachesvc.daemon.tenants import STRANGER, Peer, Tenants, admits, token_of
from cachesvc.v1 import cachesvc_pb2 as pb
from cachesvc.v1 import cachesvc_pb2_grpc

PROGRESS_S = 0.2
ANSWER_S = 0.2
"""How often a call that waits for a job looks whether caller and daemon are still there."""
FREED_S = 10.0
"""How long an eviction waits for disks: for commits, as what is being committed stays, and until its bytes are free, as
what comes next is placed by what is free."""
SHORT = (
    "nothing can be checked now: open files (LimitNOFILE=, ulimit -Hn), memory or processes are short, or a mount hangs;"
    " the daemon's log says which"
)
STOPPING = "the daemon is stopping; start it again: cachesvc serve"
EVICTED = "the dataset was evicted while it was filled; run prefetch again"
_Answer = TypeVar("_Answer")
MAX_FAILURES = 100
"""Named in one progress message; the rest is counted."""
NOTES_TOLD = 1000
"""Of one dataset: 8 are printed, and a message has its limit."""
MAX_URIS = 100_000
PLANS_AT_ONCE = 4
"""Being read: for that moment a plan of a million entries takes 300 MB, and no more cores would make it quicker."""


class Service(cachesvc_pb2_grpc.CacheServicer):  # type: ignore[misc]
    """Handlers run on gRPC's threads; whatever they ask of the core goes through the loop."""

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
        self._settings = settings
        self._tenants = tenants
        self._lookups = lookups
        self._started = started
        self._plans = threading.BoundedSemaphore(PLANS_AT_ONCE)

    def OpenDataset(
        self, request: pb.OpenDatasetRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.OpenDatasetReply]:
        with statuses(context):
            uris = self._canonical(request.uris, self._caller(context))
            options = options_of(request.options, self._settings)
            answers: queue.Queue[jobs.Answer] = queue.Queue()
            opening = self._open(uris, options, request.refresh, self._uid(context), answers)
            try:
                while isinstance(answer := self._next(answers, context), jobs.Progress):
                    yield pb.OpenDatasetReply(indexed_bytes=answer.done_bytes, total_bytes=answer.total_bytes)
            finally:
                self._loop.post(lambda: self._runner.builds.leave(opening, answers.put))
            if answer.code:
                raise errors.from_code(answer.code, answer.message)
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
            self._runner.datasets.tidy(self._pins.stored)
            yield pb.OpenDatasetReply(dataset=described(dataset), notes=dataset.catalog.notes[:NOTES_TOLD])

    def SubmitPlan(
        self, requests: Iterator[pb.SubmitPlanRequest], context: grpc.ServicerContext
    ) -> pb.SubmitPlanReply:
        with statuses(context):
            said = next(requests, pb.SubmitPlanRequest())
            reader, known = self._loop.call(lambda: self._dataset_of(said))
            plan = Plan()
            for part in chain((said,), requests):
                plan.take(part)
            if part.more:  # a call that is cancelled ends for us as one whose parts have all come
                raise errors.InvalidInput("the plan broke off before its last part")
            with self._plans:
                entries, following = entries_of(plan, known), following_of(plan, known)
            planned = events.Planned(reader, reader, entries, following)

            def submit() -> None:
                if self._runner.grants is not None:
                    self._runner.grants.heed(reader)  # how far it came in the plan before this one
                self._dataset_of(said)  # a reader that went away meanwhile has no plan
                self._runner.handle(planned)

            self._loop.call(submit)
            return pb.SubmitPlanReply()

    def Prefetch(
        self, request: pb.PrefetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PrefetchReply]:
        with statuses(context):
            dataset = self._dataset(request.dataset, context)
            job, user = self._runner.next_id(), self._uid(context)
            try:
                self._loop.call(lambda: self._runner.declare(job, dataset, user, gradual=True))
                self._after(self._runner.node.claims.claimed, dataset, context)
                if not request.dry_run:
                    self._loop.call(lambda: self._runner.handle(events.Prefetched(job, dataset.id)))
                yield from self._progressing(job, dataset, request.dry_run, context)
            finally:
                self._loop.post(lambda: self._runner.handle(events.JobEnded(job)))

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        with statuses(context):
            reply = self._loop.call(self._status)
            caller = self._caller(context)
            reply.allow.extend(self._tenants.prefixes(caller))
            reply.datasets.extend(self._datasets(caller))
            return reply

    def List(self, request: pb.ListRequest, context: grpc.ServicerContext) -> pb.ListReply:
        with statuses(context):
            return pb.ListReply(datasets=self._datasets(self._caller(context)))

    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinReply:
        with statuses(context):
            dataset = self._dataset(request.dataset, context)
            pinned: queue.Queue[None] = queue.Queue()
            self._pins.pin(dataset, request.pinned, self._uid(context), partial(pinned.put, None))
            self._next(pinned, context)
            return pb.PinReply()

    def Evict(self, request: pb.EvictRequest, context: grpc.ServicerContext) -> pb.EvictReply:
        with statuses(context):
            dataset = self._dataset(request.dataset, context)
            self._wait_for_tiers(context)
            # on this thread, which reads only: too long for the loop
            before = {extent for extent, _ in self._runner.resident(dataset)}
            self._loop.call(lambda: self._runner.handle(events.EvictAsked(dataset.id, dataset.extent_ids)))
            self._after(self._runner.node.claims.evicted, dataset, context)
            self._wait_for_tiers(context)
            stayed = (extent for extent, _ in self._runner.resident(dataset) if extent in before)
            busy_bytes = dataset.bytes_of(stayed)
            return pb.EvictReply(
                evicted_bytes=dataset.bytes_of(before) - busy_bytes,
                busy_bytes=busy_bytes,
                lost_bytes=dataset.bytes_of(self._runner.out_of_reach(dataset)),
            )

    def _wait_for_tiers(self, context: grpc.ServicerContext) -> None:
        done: queue.Queue[None] = queue.Queue()
        self._loop.call(lambda: self._runner.after_tiers(partial(done.put, None)))
        with suppress(queue.Empty):  # a disk that hangs is lost some time, or goes on
            self._next(done, context, FREED_S)

    def Verify(self, request: pb.VerifyRequest, context: grpc.ServicerContext) -> Iterator[pb.VerifyReply]:
        with statuses(context):
            dataset = self._dataset(request.dataset, context)
            resident = self._runner.resident(dataset)  # reads only, and too long for the loop
            corrupt = 0
            for checked, (extent, tier) in enumerate(resident, start=1):
                corrupt += not self._verify(extent, tier, context)
                yield pb.VerifyReply(checked_extents=checked, extents=len(resident), corrupt_extents=corrupt)
            yield pb.VerifyReply(
                checked_extents=len(resident), extents=len(resident), corrupt_extents=corrupt, done=True
            )

    def _caller(self, context: grpc.ServicerContext) -> Peer | None:
        """The user whose grants connection the call names; None when it names none that lives."""
        token = token_of(context.invocation_metadata())
        assert self._runner.grants is not None
        return None if token is None else self._runner.grants.caller(token)

    def _uid(self, context: grpc.ServicerContext) -> int:
        caller = self._caller(context)
        return caller.uid if caller else STRANGER

    def _canonical(self, uris: Sequence[str], caller: Peer | None) -> list[str]:
        if not uris or len(uris) > MAX_URIS:
            raise errors.InvalidInput(f"{len(uris)} URIs; give 1 to {MAX_URIS:,}")
        return self._lookups.run(lambda: [self._tenants.check(uri, caller) for uri in uris], uris[0])

    def _dataset(self, wanted: str, context: grpc.ServicerContext) -> Dataset:
        loaded = self._runner.datasets.load(DatasetId(wanted)).result()
        if not admits(loaded.rules, self._caller(context)):
            raise unknown(DatasetId(wanted))
        return self._loop.call(lambda: self._runner.datasets.admit(loaded))

    def _open(
        self, uris: list[str], options: Options, refresh: bool, user: int, answers: queue.Queue[jobs.Answer]
    ) -> Opening:
        plain = {field.name: getattr(options, field.name) for field in fields(options)}
        job = partial(
            jobs.Build, uris=uris, options=plain, catalogs=self._runner.datasets.directory, refresh=refresh
        )
        asked = (tuple(uris), options, refresh)
        return self._loop.call(lambda: self._runner.builds.open(user, asked, job, answers.put))

    def _dataset_of(self, request: pb.SubmitPlanRequest) -> tuple[ReaderId, Known]:
        assert self._runner.grants is not None
        found = self._runner.grants.dataset_of(request.reader)
        if found is None or found[1].id != request.dataset:
            raise errors.InvalidInput(f"no reader of dataset {request.dataset} that lives has this token")
        return found

    def _progressing(
        self, job: int, dataset: Dataset, dry_run: bool, context: grpc.ServicerContext
    ) -> Iterator[pb.PrefetchReply]:
        """A prefetch until it is done; of a dry one what there is now. Raises CacheError when an eviction ends it."""
        while True:
            reply = self._loop.call(lambda: self._progress(job, dataset))
            if dry_run:
                reply.done = True
            if reply.done:
                self._loop.call(partial(self._add_unfit, reply, dataset.id, dry_run))
            yield reply
            if reply.done or not context.is_active():
                return
            if not self._loop.call(lambda: self._runner.node.claims.prefetching(job)):
                raise errors.CacheError(EVICTED)
            time.sleep(PROGRESS_S)

    def _progress(self, job: int, dataset: Dataset) -> pb.PrefetchReply:
        progress = self._runner.node.progress(job)
        failures = [
            pb.ExtentFailure(extent=extent.hex(), message=message, code=code)
            for extent, (code, message) in list(progress.failed.items())[:MAX_FAILURES]
        ]
        return pb.PrefetchReply(
            extents=len(dataset.extent_ids),
            resident_extents=progress.resident_extents,
            size_bytes=dataset.size_bytes,
            resident_bytes=progress.resident_bytes,
            source_bytes=self._runner.fills.source_bytes(dataset.id),
            peer_bytes=self._runner.fills.peer_bytes(dataset.id),
            unfit_bytes=progress.stuck_bytes,
            failures=failures,
            done=progress.finished,
        )

    def _add_unfit(self, reply: pb.PrefetchReply, dataset: DatasetId, planned: bool) -> None:
        """Bytes of a dataset beyond its quotas and the room that nobody's kept extents take, where they are not known but
        planned; and how many of them are beyond quotas alone. An extent straddles no tiers, so it can be more by an
        extent a tier."""
        node = self._runner.node
        shares = node.policy.shares
        tiers = [tier for tier in node.status().tiers if not tier.lost]
        room = sum(max(0, tier.budget_bytes - tier.reserve_bytes - tier.kept_bytes) for tier in tiers)
        left = max(0, shares.quota_left(shares.datasets[dataset]))
        missing = reply.size_bytes - reply.resident_bytes
        if planned:
            reply.unfit_bytes = max(0, int(missing - min(room, left)))
        if reply.unfit_bytes:
            reply.lost_tiers.extend(tier.name for tier in node.policy.tiers.values() if tier.lost)
        if left < missing:
            reply.over_quota_bytes = max(0, reply.unfit_bytes - max(0, missing - room))

    def _verify(self, extent: ExtentId, tier: TierName, context: grpc.ServicerContext) -> bool:
        answers: queue.Queue[Good] = queue.Queue()
        user = self._uid(context)

        def ask() -> None:
            if self._runner.node.where(extent) == tier:
                self._runner.checks.verify(extent, tier, answers.put, user)
            else:
                answers.put(True)  # evicted or moved since it was listed: nothing corrupt is left

        self._loop.call(ask)
        good = self._next(answers, context)
        if good is None:
            raise errors.DaemonUnavailable(SHORT)
        return good

    def _after(
        self, done: Callable[[DatasetId], bool], dataset: Dataset, context: grpc.ServicerContext
    ) -> None:
        answers: queue.Queue[None] = queue.Queue()
        self._loop.call(lambda: self._runner.after(done, dataset.id, partial(answers.put, None)))
        self._next(answers, context)

    def _next(
        self, answers: queue.Queue[_Answer], context: grpc.ServicerContext, patience_s: float = math.inf
    ) -> _Answer:
        """The next answer of a job. A caller that went away frees its thread, and so does a daemon that ends. Raises
        queue.Empty when patience is over."""
        until = time.monotonic() + patience_s
        while True:
            try:
                return answers.get(timeout=ANSWER_S)
            except queue.Empty:
                if self._loop.ended:
                    raise errors.DaemonUnavailable(STOPPING) from None
                if not context.is_active():
                    raise errors.DeadlineExceeded("the caller did not wait for the answer") from None
                if time.monotonic() >= until:
                    raise

    def _status(self) -> pb.StatusReply:
        assert self._runner.grants is not None
        status = self._runner.node.status()
        tiers = [
            pb.TierStatus(
                name=tier.tier,
                budget_bytes=tier.budget_bytes,
                used_bytes=tier.used_bytes,
                held_bytes=tier.held_bytes,
                lost=tier.lost,
                corrupt_extents=tier.corrupt_count,
                scrubbed_bytes=tier.scrubbed_bytes,
            )
            for tier in status.tiers
        ]
        return pb.StatusReply(
            version=cachesvc.__version__,
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._started,
            tiers=tiers,
            readers=self._runner.grants.readers().total(),
            fills_running=status.fills,
            sources=pb.SourceStatus(**asdict(self._runner.asked())),
        )

    def _datasets(self, caller: Peer | None) -> list[pb.DatasetStatus]:
        seen = (each for each in self._loop.call(self._runner.listed) if admits(each.rules, caller))
        return [self._dataset_status(dataset) for dataset in seen]

    def _dataset_status(self, dataset: Dataset) -> pb.DatasetStatus:
        """Walks the extents on the caller's thread, reading only: 7 us each, too long for the loop."""
        resident = self._runner.resident(dataset)
        found = self._loop.call(lambda: self._counted(dataset))
        found.dataset.CopyFrom(described(dataset))
        found.resident_bytes = dataset.bytes_of(extent for extent, _ in resident)
        found.resident_extents = len(resident)
        return found

    def _counted(self, dataset: Dataset) -> pb.DatasetStatus:
        assert self._runner.grants is not None
        counters = self._runner.node.counters(dataset.id)
        return pb.DatasetStatus(
            readers=self._runner.grants.readers_of(dataset.id),
            pinned=dataset.id in self._pins,
            hits=counters.hits,
            ahead=counters.ahead,
            misses=counters.misses,
            refused=counters.refused,
            source_bytes=self._runner.fills.source_bytes(dataset.id),
            peer_bytes=self._runner.fills.peer_bytes(dataset.id),
            bound=counters.bound,
            kept_bytes=counters.kept_bytes,
            epochs=[
                pb.EpochStatus(
                    number=each.number,
                    touched=each.touched,
                    hits=each.hits,
                    hit_rate=each.hit_rate,
                    bound=each.bound,
                    of_bound=each.of_bound,
                )
                for each in counters.epochs
            ],
        )
