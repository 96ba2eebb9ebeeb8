"""Connected readers, and their requests: turned into events for the core."""

from __future__ import annotations

import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial

from cachesvc.core import events, wire
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, OutOfSpace
from cachesvc.core.histogram import Histogram
from cachesvc.core.model import RAM, DatasetId, ExtentId, ObjectVersion, ReaderId
from cachesvc.core.stalls import StallReport, Stalls
from cachesvc.core.tiering.budgets import working
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.access.tenants import Peer, Tenants, admits
from cachesvc.daemon.claims import DatasetClaims
from cachesvc.daemon.datasets import Datasets, ServedDataset, unknown
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.preparers import Preparers
from cachesvc.daemon.grants.plan_intake import PlanEntries, ReceivedPlan
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.object_parts import ObjectPart, ObjectParts
from cachesvc.daemon.runner import Runner
from cachesvc.sources.uri import local_path

log = logging.getLogger(__name__)


RECENT_REPORTS = 8
"""Reports of a rank that are kept. It sends one every 5 s while it takes batches, and more where an epoch ends."""


@dataclass(frozen=True, slots=True)
class TimedReport:
    """A rank's report on the time between `since` and `at`, on the monotonic clock."""

    since: float
    at: float
    stalls: StallReport


@dataclass(slots=True)
class ConnectedReader:
    """One connection to the grants socket."""

    id: ReaderId
    channel: socket.socket
    peer: Peer
    token: int = field(repr=False)
    """Identifies the caller at the control API. Only this connection is told the token, so it is never logged."""
    gone: bool = False
    greeted: bool = False
    dataset: ServedDataset | None = None
    plan: ReceivedPlan | None = None
    """The plan that is being read. Later messages of this reader wait until that is done."""
    asked_at: dict[int, float] = field(default_factory=dict)
    """When each request for an extent came that has no answer yet, on the monotonic clock."""
    features: int = 0
    """Bits of its greeting."""
    parts: dict[int, ObjectPart] = field(default_factory=dict)
    """The parts of objects that it waits for, by request."""
    job: int = 0
    """The fair queue's key for its demands: its user and launch. 0: the reader alone."""

    since: float = field(default_factory=time.monotonic)
    """When it connected."""
    reports: deque[TimedReport] = field(default_factory=lambda: deque(maxlen=RECENT_REPORTS))
    """What a rank reported of its steps last."""

    def join_job(self, launch: int) -> None:
        """Join the readers of one job, which send the same `launch`."""
        self.job = (self.peer.uid + 1) << 64 | launch if launch else 0


class ReaderEvents:
    """Runs on the loop's thread."""

    def __init__(
        self,
        runner: Runner,
        loop: Loop,
        datasets: Datasets,
        claims: DatasetClaims,
        quotas: Quotas,
        checks: Checks,
        preparers: Preparers,
        tenants: Tenants,
        object_parts: ObjectParts,
    ) -> None:
        self.handle = runner.handle
        self.preparers = preparers
        self.step_waits = Histogram()
        """How long steps of all ranks waited for their batches."""
        self.stalls: dict[DatasetId, Stalls] = {}
        """How long the steps of each dataset's readers waited."""
        self._node = runner.node
        self._loop, self._datasets = loop, datasets
        self._claims, self._quotas, self._checks = claims, quotas, checks
        self._tenants, self._object_parts = tenants, object_parts
        self._reported: set[int] = set()
        """Users whose excess claims of held memory were logged."""

    def connected(
        self, reader: ConnectedReader, dataset: DatasetId, then: Callable[[ServedDataset | CacheError], None]
    ) -> None:
        """Load a dataset on another thread and declare it for the reader; `then` gets the dataset or the error, unless the
        reader has left."""

        def declared(known: ServedDataset) -> None:
            if reader.gone:
                return
            if reader.features & wire.PREPARES and known.source is not None:
                self.preparers.joined(reader.id, known.id)
            then(known)

        def loaded(future: Future[ServedDataset]) -> None:
            if reader.gone:
                return  # a claim for a reader that has left would never end
            error = future.exception() or self._refusal(future.result(), reader)
            if error is None:
                known = self._datasets.admit(future.result())
                if reader.features & wire.CLAIMS_NOTHING:
                    declared(known)
                    return
                self._claims.declare(reader.id, known, reader.peer.uid, gradual=True)
                self._claims.after(self._node.claims.claimed, known.id, partial(declared, known))
            elif isinstance(error, CacheError):
                then(error)
            else:
                log.error("a catalog cannot be loaded", extra={"dataset": dataset, "error": str(error)})
                then(CacheError(f"the catalog of dataset {dataset} cannot be loaded: {error}"))

        self._datasets.load(dataset).add_done_callback(lambda f: self._loop.post(lambda: loaded(f)))

    def _refusal(self, dataset: ServedDataset, reader: ConnectedReader) -> CacheError | None:
        """The reason why a user may not have a dataset; None where the user may."""
        if not admits(dataset.rules, reader.peer):
            return unknown(dataset.id)
        try:
            self._claims.check_share(dataset, reader.peer.uid)
        except OutOfSpace as error:
            return error
        return None

    def held(self, reader: ConnectedReader, extent: ExtentId, size_bytes: int) -> None:
        """Handle HOLD: a reader holds an extent since before this daemon's start. `size_bytes`: its memory; 0 for a file.

        Without a limit a user could take the RAM tier by claims alone. The limit of a user is its quota, or half of the RAM
        budget without one; the daemon's own user may claim all of the budget.
        """
        user, ram = reader.peer.uid, self._node.policy.tiers.get(RAM)
        limit_bytes = ram.budget_bytes if ram else 0
        if user != os.geteuid():
            quota_bytes = self._quotas.of_user(user)
            limit_bytes = limit_bytes // 2 if quota_bytes is None else quota_bytes
        self.handle(events.HoldReported(reader.id, extent, size_bytes, user, limit_bytes))
        if self._node.readers.held_bytes(reader.id, extent) < size_bytes and user not in self._reported:
            self._reported.add(user)
            log.warning(
                "memory that a reader claims to hold from before the start is not counted",
                extra={"peer_uid": user, "most_bytes": limit_bytes},
            )

    def is_resident(self, extent: ExtentId) -> bool:
        """Tell whether a copy of an extent would be granted now."""
        return self._node.where(extent) is not None

    def read(self, reader: ConnectedReader, request: int, version: ObjectVersion, offset: int) -> None:
        """Handle READ. Raises NotAllowed, and InvalidInput for a local file, or for a byte that is not there."""
        if local_path(version.uri) is not None:
            raise InvalidInput(f"{version.uri} is a local file: open it as a dataset")
        if not self._tenants.may_read(version.uri, reader.peer):
            raise NotAllowed(f"{version.uri} is not below a prefix that you may use")
        part = self._object_parts.find(version, offset)
        reader.parts[request] = part
        self._object_parts.wait(part)
        size_bytes = part.extent_bytes
        self.handle(events.Demanded(reader.id, request, part.extent, size_bytes=size_bytes, job=reader.job))

    def answered(self, reader: ConnectedReader, request: int) -> ObjectPart | None:
        """Return the part that a request asked for, and forget it; None for a request of an extent of a dataset."""
        part = reader.parts.pop(request, None)
        if part is not None:
            self._object_parts.answered(part)
        return part

    def suspected(self, extent: ExtentId) -> None:
        """Handle SUSPECT: a reader found wrong bytes in a copy on a disk."""
        self._checks.mark_unverified(extent)

    def gone(self, reader: ConnectedReader) -> None:
        """Handle the reader's end, which ends its leases, its plan and its claim in this order, and unload the
        catalogs that nothing needs any more."""
        self.handle(events.ReaderGone(reader.id))
        self.preparers.left(reader.id)
        for request in list(reader.parts):
            self.answered(reader, request)
        self.handle(events.PlanEnded(reader.id))
        self.handle(events.JobEnded(reader.id))
        self._datasets.unload_unclaimed()

    def tier_budgets(self) -> list[int]:
        """Budgets in bytes of the tiers that are not lost."""
        return [tier.budget_bytes for tier in working(self._node.policy.tiers)]

    def planned(self, reader: ConnectedReader, plan: PlanEntries) -> None:
        """Handle a PLAN that has been read."""
        begun = events.Planned(reader.id, reader.id, plan.entries, plan.following)
        self.handle(replace(begun, launch=reader.job, user=reader.peer.uid, local=plan.local))

    def waited(self, reader: ConnectedReader, dataset: DatasetId, report: StallReport) -> None:
        """Handle WAITED: add how long a rank's steps waited."""
        since = reader.reports[-1].at if reader.reports else reader.since
        reader.reports.append(TimedReport(since, time.monotonic(), report))
        self.stalls.setdefault(dataset, Stalls()).add(report)
        if report.buckets:
            self.step_waits.add(report.buckets, sum(report.waited_us) / 1e6)
