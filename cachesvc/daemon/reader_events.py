"""Requests of readers that came through the grants socket, turned into events for the core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from cachesvc.core import events
from cachesvc.core.errors import CacheError, OutOfSpace
from cachesvc.core.model import DatasetId, ExtentId, ReaderId
from cachesvc.core.stalls import StallReport, Stalls
from cachesvc.core.tiering.budgets import working
from cachesvc.daemon.access.tenants import NO_USER, Peer, admits
from cachesvc.daemon.datasets import ServedDataset, check_share, unknown
from cachesvc.daemon.grants.connected_readers import GrantableDataset
from cachesvc.daemon.grants.hold_claims import HoldClaims
from cachesvc.daemon.grants.plan_intake import PlanEntries
from cachesvc.daemon.runner import Runner

log = logging.getLogger(__name__)


class ReaderEvents:
    """Implements `grants.connected_readers.ReaderRequests`. Runs on the loop's thread."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._hold_claims = HoldClaims(runner.node, runner.handle)

    def handle(self, event: events.Event) -> None:
        """Give an event to the core."""
        self._runner.handle(event)

    def connected(
        self, reader: ReaderId, dataset: DatasetId, then: Callable[[GrantableDataset | CacheError], None]
    ) -> None:
        """Load a dataset on another thread and declare it for the reader; `then` gets the dataset or the error."""
        runner = self._runner

        def declared(known: ServedDataset) -> None:
            if runner.grants is not None and runner.grants.is_connected(reader):
                then(known)

        def loaded(future: Future[ServedDataset]) -> None:
            if runner.grants is None or not runner.grants.is_connected(reader):
                return  # a claim for a reader that has left would never end
            error = future.exception() or self._refusal(future.result(), runner.grants.peer(reader))
            if error is None:
                known = runner.datasets.admit(future.result())
                runner.declare(reader, known, gradual=True)
                runner.after(runner.node.claims.claimed, known.id, partial(declared, known))
            elif isinstance(error, CacheError):
                then(error)
            else:
                log.error("a catalog cannot be loaded", extra={"dataset": dataset, "error": str(error)})
                then(CacheError(f"the catalog of dataset {dataset} cannot be loaded: {error}"))

        runner.datasets.load(dataset).add_done_callback(lambda f: runner.loop.post(lambda: loaded(f)))

    def _refusal(self, dataset: ServedDataset, peer: Peer) -> CacheError | None:
        """The reason why a user may not have a dataset; None where the user may."""
        if not admits(dataset.rules, peer):
            return unknown(dataset.id)
        try:
            check_share(self._runner.node, dataset, peer.uid)
        except OutOfSpace as error:
            return error
        return None

    def held(self, reader: ReaderId, extent: ExtentId, size_bytes: int) -> None:
        """Handle HOLD: the reader holds an extent since before this daemon's start."""
        user = self._user_of(reader)
        self._hold_claims.claim(reader, user, self._runner.quotas.of_user(user), extent, size_bytes)

    def suspected(self, extent: ExtentId) -> None:
        """Handle SUSPECT: a reader found wrong bytes in a copy on a disk."""
        self._runner.checks.mark_unverified(extent)

    def gone(self, reader: ReaderId) -> None:
        """Handle the reader's end, which ends its leases, its plan and its claim in this order, and unload the
        catalogs that nothing needs any more."""
        handle = self._runner.handle
        handle(events.ReaderGone(reader))
        handle(events.PlanEnded(reader))
        handle(events.JobEnded(reader))
        self._runner.datasets.unload_unclaimed()

    def tier_budgets(self) -> list[int]:
        """Budgets in bytes of the tiers that are not lost."""
        return [tier.budget_bytes for tier in working(self._runner.node.policy.tiers)]

    def planned(self, reader: ReaderId, plan: PlanEntries) -> None:
        """Handle a PLAN that has been read."""
        grants = self._runner.grants
        launch, user = grants.job_of(reader) if grants else 0, self._user_of(reader)
        event = events.Planned(reader, reader, plan.entries, plan.following, launch=launch, user=user)
        self._runner.handle(event)

    def waited(self, dataset: DatasetId, report: StallReport) -> None:
        """Handle WAITED: add how long a rank's steps waited."""
        self._runner.stalls.setdefault(dataset, Stalls()).add(report)

    def _user_of(self, reader: ReaderId) -> int:
        grants = self._runner.grants
        return grants.user_of(reader) if grants else NO_USER
