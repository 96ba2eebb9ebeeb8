"""Implements the gRPC service: translates requests into calls on the loop, and typed errors into statuses."""

from __future__ import annotations

import os
import queue
from collections.abc import Iterator
from contextlib import suppress
from functools import partial

import grpc
import msgspec

from cachesvc.catalog.options import Options
from cachesvc.catalog.prepared import PreparedForm, Recipe, origin_of
from cachesvc.config import Settings
from cachesvc.core import errors, events
from cachesvc.core.model import DatasetId, ExtentId, TierName
from cachesvc.core.node.node import Node
from cachesvc.daemon.access.tenants import ANONYMOUS, is_own_user
from cachesvc.daemon.claims import DatasetClaims
from cachesvc.daemon.control.callers import Callers
from cachesvc.daemon.control.drain import Drain
from cachesvc.daemon.control.late_evictions import LateEvictions
from cachesvc.daemon.control.pins import Pins
from cachesvc.daemon.control.prefetch_runs import PrefetchRuns
from cachesvc.daemon.control.reports import EventStream, Reports, dataset_message, options_of, stale_text
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.disks.tier_threads import TierThreads
from cachesvc.daemon.events.journal import Journal
from cachesvc.daemon.fills.build_queue import BuildQueue, BuildRequest
from cachesvc.daemon.fills.checks import CheckResult, Checks
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.loop.waiting import CallWaits
from cachesvc.daemon.object_parts import sharing
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.daemon.peers.relays import Relays
from cachesvc.daemon.processes import jobs
from cachesvc.daemon.processes.own_command import run_verb
from cachesvc.daemon.reload.reloader import Reloader
from cachesvc.daemon.residency import out_of_reach, resident, sizes_of
from cachesvc.daemon.runner import Runner
from cachesvc.v1 import cachesvc_pb2 as pb

FREED_S = 10.0
"""How long an eviction waits for disks: before it for commits, since a committing extent is not evicted, and after it
until the bytes are free, since the next fill is placed by free bytes."""
CHECKS_UNAVAILABLE = (
    "nothing can be checked now: open files (LimitNOFILE=, ulimit -Hn), memory or processes are short, or a mount hangs;"
    " the daemon's log says which"
)
STALE = errors.SourceUnavailable.__name__
ALONE = "this daemon is alone; start it with --cluster to share extents with other nodes"
MAX_NOTES = 1000
"""Notes of one dataset in a reply: the CLI prints 8, and a message has its limit."""
EXAMINE_S = 120.0


class Service:
    """Methods run on gRPC's threads. They reach the core only through the loop."""

    def __init__(
        self,
        loop: Loop,
        runner: Runner,
        datasets: Datasets,
        claims: DatasetClaims,
        callers: Callers,
        pins: Pins,
        prefetches: PrefetchRuns,
        reports: Reports,
        builds: BuildQueue,
        checks: Checks,
        threads: TierThreads,
        journal: Journal,
        reloader: Reloader,
        extent_bytes: int,
        cluster: ClusterLink | None,
        grants: GrantsServer,
        relays: Relays | None,
        late_evictions: LateEvictions | None,
        drain: Drain | None,
    ) -> None:
        """`extent_bytes`: the size of extents where a caller gives none. `cluster` is None without one, and `relays`,
        `late_evictions` and `drain` with it."""
        self._loop, self._runner, self._waiting = loop, runner, CallWaits(loop)
        self._datasets, self._claims, self._callers = datasets, claims, callers
        self._pins, self._prefetches, self._reports = pins, prefetches, reports
        self._builds, self._checks, self._threads = builds, checks, threads
        self._events, self._reloader = EventStream(journal, self._waiting), reloader
        self._extent_bytes, self._cluster, self._grants = extent_bytes, cluster, grants
        self._relays, self._late_evictions, self._drain = relays, late_evictions, drain

    def OpenDataset(
        self, request: pb.OpenDatasetRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.OpenDatasetReply]:
        with self._callers.answering(context, next(iter(request.uris), "")):
            uris = self._callers.canonical(request.uris, context)
            options = options_of(request.options, self._extent_bytes)
            answers: queue.Queue[jobs.Answer] = queue.Queue()
            opening = self._open(uris, options, request, self._callers.uid(context), answers)
            try:
                while isinstance(answer := self._waiting.next(answers, context), jobs.BuildProgress):
                    yield pb.OpenDatasetReply(indexed_bytes=answer.done_bytes, total_bytes=answer.total_bytes)
            finally:
                self._loop.post(lambda: self._builds.cancel(opening, answers.put))
            self._datasets.tidy(self._pins.stored)  # also after a build that found no room
            if answer.code:
                message = self._callers.without_secret_names(answer.message, context)
                raise errors.from_code(answer.code, message)
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
            self._loop.call(partial(self._datasets.note_opening, dataset.id, answer.listed_at))
            stale = stale_text(dataset, answer.listed_at, answer.message) if answer.listed_at else ""
            self._callers.record(
                context,
                "opened",
                dataset,
                size_bytes=dataset.size_bytes,
                error=STALE if stale else "",
                why=stale,
            )
            self._loop.call(lambda: self._claims.refill_holes(dataset))
            yield pb.OpenDatasetReply(
                dataset=dataset_message(dataset),
                notes=dataset.catalog.notes[:MAX_NOTES],
                stale=stale,
                kept=[dataset.id, *answer.before] if stale else [],
                sharing=self._sharing(dataset, context),
            )

    def OpenPrepared(
        self, request: pb.OpenPreparedRequest, context: grpc.ServicerContext
    ) -> pb.OpenPreparedReply:
        with self._callers.answering(context, request.source):
            source, user = self._dataset(request.source, context), self._callers.uid(context)
            if user == ANONYMOUS:
                raise errors.NotAllowed("prepared data belongs to a user of this node; open it there")
            recipe = Recipe(
                request.name, request.digest, request.spec, request.given_name, dict(request.versions)
            )
            form = PreparedForm.from_json(request.form) if request.form else None
            loaded = self._datasets.prepared(source, recipe, form, user)
            if loaded is None:
                return pb.OpenPreparedReply()
            dataset = self._loop.call(lambda: self._datasets.admit(loaded))
            origin = origin_of(dataset.catalog)
            assert origin is not None, "a prepared dataset"
            return pb.OpenPreparedReply(
                dataset=dataset_message(dataset), digest=origin.digest, versions=origin.versions
            )

    def Prefetch(
        self, request: pb.PrefetchRequest, context: grpc.ServicerContext
    ) -> Iterator[pb.PrefetchReply]:
        with self._callers.answering(context, request.dataset):
            dataset = self._dataset(request.dataset, context)
            user = self._callers.uid(context)
            reply = pb.PrefetchReply()
            try:
                for reply in self._prefetches.attached(dataset, user, request.dry_run, context):
                    yield reply
            finally:
                if not request.dry_run:
                    why = f"{reply.unfit_bytes:,} bytes have no room" if reply.unfit_bytes else ""
                    why = why if reply.done else "it was ended early"
                    self._callers.record(
                        context, "prefetched", dataset, size_bytes=reply.resident_bytes, why=why
                    )

    def StartPrefetch(
        self, request: pb.StartPrefetchRequest, context: grpc.ServicerContext
    ) -> pb.StartPrefetchReply:
        with self._callers.answering(context, request.dataset):
            dataset = self._dataset(request.dataset, context)
            started = self._prefetches.start(dataset, self._callers.uid(context), request.id)
            return pb.StartPrefetchReply(id=started)

    def Prefetches(self, request: pb.PrefetchesRequest, context: grpc.ServicerContext) -> pb.PrefetchesReply:
        with self._callers.answering(context):
            return pb.PrefetchesReply(prefetches=self._prefetches.listed(self._callers.of(context)))

    def CancelPrefetch(
        self, request: pb.CancelPrefetchRequest, context: grpc.ServicerContext
    ) -> pb.CancelPrefetchReply:
        with self._callers.answering(context):
            self._prefetches.cancel(request.id, self._callers.of(context))
            return pb.CancelPrefetchReply()

    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusReply:
        with self._callers.answering(context):
            return self._reports.snapshot(self._callers.of(context), self._callers.prefixes(context))

    def List(self, request: pb.ListRequest, context: grpc.ServicerContext) -> pb.ListReply:
        with self._callers.answering(context):
            return pb.ListReply(datasets=self._reports.datasets(self._callers.of(context)))

    def Nodes(self, request: pb.NodesRequest, context: grpc.ServicerContext) -> pb.NodesReply:
        return self._reports.nodes()

    def Events(self, request: pb.EventsRequest, context: grpc.ServicerContext) -> Iterator[pb.Event]:
        with self._callers.answering(context):
            yield from self._events.run(request, self._callers.of(context), context)

    def Examine(self, request: pb.ExamineRequest, context: grpc.ServicerContext) -> Iterator[pb.Finding]:
        with self._callers.answering(context):
            self._own_user_only(context, "have it examined")
            yield from examine(self._reloader.settings)

    def Reload(self, request: pb.ReloadRequest, context: grpc.ServicerContext) -> pb.ReloadReply:
        with self._callers.answering(context):
            self._own_user_only(context, "reload its settings")
            changes = self._reloader.reload()
            return pb.ReloadReply(taken=changes.taken, waiting=changes.waiting)

    def Bypass(self, request: pb.BypassRequest, context: grpc.ServicerContext) -> pb.BypassReply:
        with self._callers.answering(context):
            self._own_user_only(context, "bypass the cache", or_root=True)
            if self._grants.bypass.set(request.on):
                self._loop.call(self._grants.bypass_changed)
                self._callers.record(context, "bypassed" if request.on else "bypass_ended")
            return pb.BypassReply()

    def RemoveNode(self, request: pb.RemoveNodeRequest, context: grpc.ServicerContext) -> pb.RemoveNodeReply:
        with self._callers.answering(context):
            self._own_user_only(context, "remove a node")
            if self._cluster is None:
                raise errors.InvalidInput(ALONE)
            found = self._cluster.forget(request.name)
            return pb.RemoveNodeReply(untold=found.untold, listed=found.listed)

    def Where(self, request: pb.WhereRequest, context: grpc.ServicerContext) -> pb.WhereReply:
        with self._callers.answering(context, request.dataset):
            if self._cluster is None:
                raise errors.InvalidInput(ALONE)
            return where(self._dataset(request.dataset, context), self._runner.node, self._cluster)

    def OnNode(self, request: pb.NodeCall, context: grpc.ServicerContext) -> Iterator[pb.NodeAnswer]:
        with self._callers.answering(context):
            if self._relays is None:
                raise errors.InvalidInput(ALONE)
            yield from self._relays.relayed(request, is_own_user(self._callers.of(context)), context)

    def Drain(self, request: pb.DrainRequest, context: grpc.ServicerContext) -> Iterator[pb.DrainReply]:
        with self._callers.answering(context):
            self._own_user_only(context, "drain it")
            if self._drain is None:
                raise errors.InvalidInput(ALONE)
            yield from self._drain.run(request.timeout_s, context)

    def EvictLater(self, request: pb.EvictLaterRequest, context: grpc.ServicerContext) -> pb.EvictLaterReply:
        with self._callers.answering(context):
            self._own_user_only(context, "evict on other nodes")
            if self._late_evictions is None:
                raise errors.InvalidInput(ALONE)
            return pb.EvictLaterReply(until=self._late_evictions.keep(request.nodes, request.datasets))

    def Pin(self, request: pb.PinRequest, context: grpc.ServicerContext) -> pb.PinReply:
        with self._callers.answering(context, request.dataset):
            dataset = self._dataset(request.dataset, context)
            pinned: queue.Queue[None] = queue.Queue()
            user = self._callers.uid(context)
            if request.pinned:
                self._loop.call(lambda: self._claims.check_share(dataset, user))
            self._pins.pin(dataset, request.pinned, user, partial(pinned.put, None))
            self._waiting.next(pinned, context)
            kind = "pinned" if request.pinned else "unpinned"
            self._callers.record(context, kind, dataset, size_bytes=dataset.size_bytes)
            return pb.PinReply()

    def Evict(self, request: pb.EvictRequest, context: grpc.ServicerContext) -> pb.EvictReply:
        with self._callers.answering(context, request.dataset):
            dataset, node = self._dataset(request.dataset, context), self._runner.node
            self._after_tiers(context)
            before, sizes = {extent for extent, _ in resident(node, dataset)}, sizes_of(node, dataset)
            self._loop.call(lambda: self._runner.handle(events.EvictAsked(dataset.id, dataset.extent_ids)))
            self._waiting.until(
                lambda then: self._claims.after(node.claims.evicted, dataset.id, then), context
            )
            self._after_tiers(context)
            stayed = (extent for extent, _ in resident(node, dataset) if extent in before)
            busy_bytes = dataset.bytes_of(stayed, sizes)
            evicted_bytes = dataset.bytes_of(before, sizes) - busy_bytes
            self._callers.record(context, "evicted", dataset, size_bytes=evicted_bytes)
            return pb.EvictReply(
                evicted_bytes=evicted_bytes,
                busy_bytes=busy_bytes,
                lost_bytes=dataset.bytes_of(out_of_reach(node, dataset), sizes),
            )

    def Verify(self, request: pb.VerifyRequest, context: grpc.ServicerContext) -> Iterator[pb.VerifyReply]:
        with self._callers.answering(context, request.dataset):
            dataset = self._dataset(request.dataset, context)
            found = resident(self._runner.node, dataset)
            corrupt = 0
            for checked, (extent, tier) in enumerate(found, start=1):
                corrupt += not self._verify(extent, tier, context)
                yield pb.VerifyReply(checked_extents=checked, extents=len(found), corrupt_extents=corrupt)
            yield pb.VerifyReply(
                checked_extents=len(found), extents=len(found), corrupt_extents=corrupt, done=True
            )

    def _own_user_only(self, context: grpc.ServicerContext, may: str, or_root: bool = False) -> None:
        if not is_own_user(self._callers.of(context)) and not (or_root and not self._callers.uid(context)):
            raise errors.NotAllowed(f"only user {os.geteuid()}, who runs the daemon, may {may}")

    def _dataset(self, wanted: str, context: grpc.ServicerContext) -> ServedDataset:
        loaded = self._callers.dataset(self._datasets, wanted, context)
        return self._loop.call(lambda: self._datasets.admit(loaded))

    def _open(
        self,
        uris: list[str],
        options: Options,
        request: pb.OpenDatasetRequest,
        user: int,
        answers: queue.Queue[jobs.Answer],
    ) -> BuildRequest:
        job = jobs.BuildJob(uris, options, self._datasets.directory, request.refresh, request.version)
        asked = (tuple(uris), options, request.refresh, request.version)
        return self._loop.call(lambda: self._builds.submit(user, asked, job, answers.put))

    def _sharing(self, dataset: ServedDataset, context: grpc.ServicerContext) -> list[DatasetId]:
        if dataset.catalog.format != "objects":
            return []
        peer = self._callers.of(context)
        return self._loop.call(lambda: sharing(self._datasets, dataset, peer))

    def _verify(self, extent: ExtentId, tier: TierName, context: grpc.ServicerContext) -> bool:
        answers: queue.Queue[CheckResult] = queue.Queue()
        user = self._callers.uid(context)

        def ask() -> None:
            if self._runner.node.where(extent) == tier:
                self._checks.verify(extent, tier, answers.put, user)
            else:
                answers.put(True)  # evicted or moved since the listing: no corrupt copy is left

        self._loop.call(ask)
        good = self._waiting.next(answers, context)
        if good is None:
            raise errors.DaemonUnavailable(CHECKS_UNAVAILABLE)
        return good

    def _after_tiers(self, context: grpc.ServicerContext) -> None:
        with suppress(queue.Empty):  # a hung disk is lost later, or answers again
            self._waiting.until(self._threads.after_all, context, FREED_S)


def examine(settings: Settings) -> list[pb.Finding]:
    """Return what `doctor` finds in a process of its own, with the daemon's settings, user and environment. Raises
    CacheError where it does not end as it should."""
    words = ["doctor", "--settings", "--json", "--config", "/dev/null"]
    done = run_verb(words, EXAMINE_S, msgspec.json.encode(settings))
    if done.returncode not in (0, 1):
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise errors.CacheError(f"the examination failed: {said or f'exit code {done.returncode}'}")
    rows = (msgspec.json.decode(line, type=dict[str, str]) for line in done.stdout.splitlines())
    return [pb.Finding(**row) for row in rows]


def where(dataset: ServedDataset, node: Node, cluster: ClusterLink) -> pb.WhereReply:
    """Ask all members of the cluster how much of a dataset each holds."""
    found = cluster.holders(dataset.extent_ids)
    report = cluster.report
    own = bytes(node.where(extent) is not None for extent in dataset.extent_ids)
    nodes = []
    for row in report.rows:
        me = row.name == report.me
        held = own if me else found.held.get(row.name)
        message = pb.NodeHolding(name=row.name, address=row.address, zone=row.zone, me=me)
        if held is None:
            message.why = found.failed.get(row.name) or row.why or f"it is {row.state}"
        else:
            sizes = [size for size, here in zip(dataset.sizes, held) if here]
            message.resident_bytes, message.resident_extents = sum(sizes), len(sizes)
        nodes.append(message)
    nodes.sort(key=lambda each: (bool(each.why), -each.resident_bytes, each.name))
    return pb.WhereReply(dataset=dataset_message(dataset), nodes=nodes)
