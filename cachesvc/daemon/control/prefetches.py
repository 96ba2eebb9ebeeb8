"""Prefetches: what they have filled, what of their dataset will not fit, and what other nodes hold of it."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator

from cachesvc.core import events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId, ExtentId
from cachesvc.core.node.node import Node
from cachesvc.daemon.claims import DatasetClaims
from cachesvc.daemon.datasets import ServedDataset
from cachesvc.daemon.fills.fill_counts import FillCounts
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.loop.waiting import Caller, CallWaits
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.daemon.peers.messages import ExtentsSurveyed
from cachesvc.daemon.runner import Runner
from cachesvc.v1 import cachesvc_pb2 as pb

PROGRESS_S = 0.2
SURVEY_S = 1.0
"""The pause between surveys while owners fetch."""
ANSWER_S = 30.0
MAX_FAILURES = 100
"""The most failures that one progress message names."""
EVICTED = "the dataset was evicted while it was filled; run prefetch again"


class Prefetches:
    """Runs on the threads of the calls. `cluster` is None without one."""

    def __init__(
        self,
        loop: Loop,
        runner: Runner,
        claims: DatasetClaims,
        counts: FillCounts,
        cluster: ClusterLink | None,
    ) -> None:
        self._loop, self._runner, self._claims = loop, runner, claims
        self._counts, self._cluster = counts, cluster
        self._waiting = CallWaits(loop)

    def run(
        self, dataset: ServedDataset, user: int, dry_run: bool, context: Caller
    ) -> Iterator[pb.PrefetchReply]:
        """Yield the progress of a prefetch until it is done, or once for a dry run. Raises OutOfSpace where the user claims
        too many extents, CacheError when an eviction ends it."""
        loop, runner, claims = self._loop, self._runner, self._claims
        loop.call(lambda: claims.check_share(dataset, user))
        job = claims.next_id()
        try:
            loop.call(lambda: claims.declare(job, dataset, user, gradual=True))
            self._waiting.until(
                lambda then: claims.after(runner.node.claims.claimed, dataset.id, then), context
            )
            if not dry_run:
                loop.call(lambda: claims.refill_holes(dataset))
                loop.call(lambda: runner.handle(events.Prefetched(job, dataset.id)))
            yield from self._progressing(job, dataset, dry_run, context)
        finally:
            loop.post(lambda: runner.handle(events.JobEnded(job)))

    def _progressing(
        self, job: int, dataset: ServedDataset, dry_run: bool, context: Caller
    ) -> Iterator[pb.PrefetchReply]:
        node, elsewhere = self._runner.node, None
        if self._cluster is not None and not dry_run:
            elsewhere = _Elsewhere(node, self._cluster, job, dataset, self._waiting)
        while True:
            reply = self._loop.call(lambda: _progress_of(node, self._counts, job, dataset, dry_run))
            if elsewhere is not None:
                elsewhere.add(reply, context)
            yield reply
            if reply.done or not context.is_active():
                return
            if not self._loop.call(lambda: node.claims.prefetching(job)):
                raise CacheError(EVICTED)
            time.sleep(PROGRESS_S)


class _Elsewhere:
    """The part of one prefetch that other nodes hold: the extents that they own. Runs on the thread of its call."""

    def __init__(
        self, node: Node, cluster: ClusterLink, job: int, dataset: ServedDataset, waiting: CallWaits
    ) -> None:
        self._node, self._cluster = node, cluster
        self._job = job
        self._dataset = dataset
        self._waiting = waiting
        self._survey = ExtentsSurveyed(0)
        self._survey_at = 0.0

    def add(self, reply: pb.PrefetchReply, context: Caller) -> None:
        """Move the extents that owners hold from `unfit_bytes` to `cluster_bytes`. While owners fetch some, the prefetch is
        not done."""
        if not reply.done or not reply.unfit_bytes:
            return
        extents = self._node.claims.elsewhere(self._job)
        if extents and time.monotonic() >= self._survey_at:
            self._survey = self._ask(extents, context)
            self._survey_at = time.monotonic() + SURVEY_S
        held, coming = self._survey.held.intersection(extents), self._survey.coming.intersection(extents)
        held_bytes = self._dataset.bytes_of(held)
        reply.cluster_extents, reply.cluster_bytes = len(held), held_bytes
        reply.unfit_bytes = max(0, reply.unfit_bytes - held_bytes)
        reply.done = not coming

    def _ask(self, extents: list[ExtentId], context: Caller) -> ExtentsSurveyed:
        answers = queue.Queue[ExtentsSurveyed]()
        self._cluster.survey(extents, answers.put)
        try:
            return self._waiting.next(answers, context, ANSWER_S)
        except queue.Empty:
            return ExtentsSurveyed(0)


def _progress_of(
    node: Node, counts: FillCounts, job: int, dataset: ServedDataset, planned: bool
) -> pb.PrefetchReply:
    """Return the progress of a job's prefetch. `planned`: nothing is filled, and the reply tells what is resident and what
    would not fit, in all of the cluster where there is one. Runs on the loop's thread."""
    progress = node.progress(job)
    failures = [
        pb.ExtentFailure(extent=extent.hex(), message=message, code=code)
        for extent, (code, message) in [*progress.failed.items(), *progress.incomplete.items()][:MAX_FAILURES]
    ]
    reply = pb.PrefetchReply(
        extents=len(dataset.extent_ids),
        resident_extents=progress.resident_extents,
        size_bytes=progress.total_bytes if dataset.uneven else dataset.size_bytes,
        resident_bytes=progress.resident_bytes,
        source_bytes=counts.source_bytes(dataset.id),
        peer_bytes=counts.peer_bytes(dataset.id),
        unfit_bytes=progress.stuck_bytes,
        failures=failures,
        done=planned or progress.finished,
    )
    if reply.done:
        _add_unfit(node, reply, dataset.id, planned)
    return reply


def _add_unfit(node: Node, reply: pb.PrefetchReply, dataset: DatasetId, planned: bool) -> None:
    """Add the lost and full tiers where bytes will not fit, and how many of the bytes exceed quotas alone. For a planned
    prefetch, first estimate those bytes from the quotas and the room without kept extents. An extent lies in one tier, so
    up to an extent more for each tier may not fit."""
    shares = node.policy.shares
    tiers = [tier for tier in node.policy.tiers.values() if not tier.lost]
    room = sum(max(0, tier.budget_bytes - tier.reserve_bytes - tier.kept_bytes) for tier in tiers)
    left = max(0, shares.quota_left(shares.datasets[dataset]))
    missing = reply.size_bytes - reply.resident_bytes
    if planned:
        room = max(
            room, shares.others_bytes + sum(tier.budget_bytes for tier in tiers) if shares.others_bytes else 0
        )
        reply.unfit_bytes = max(0, int(missing - min(room, left)))
    if reply.unfit_bytes:
        reply.lost_tiers.extend(tier.name for tier in node.policy.tiers.values() if tier.lost)
        reply.full_tiers.extend(tier.name for tier in tiers if tier.takes_nothing)
    if left < missing:
        reply.over_quota_bytes = max(0, reply.unfit_bytes - max(0, missing - room))
