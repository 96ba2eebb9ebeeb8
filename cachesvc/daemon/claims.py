"""Claims of jobs on datasets, with the quotas that bound them, and what waits until one is worked off."""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable
from functools import partial

from cachesvc.core import events
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.events import Event
from cachesvc.core.model import DatasetId
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.runner import Runner

MAX_CLAIMED_EXTENTS = 9_000_000
"""Extents of all datasets claimed by users other than the daemon's: 3 GB of records."""


class DatasetClaims:
    """Runs on the loop's thread.

    A claim, a pin or an eviction of a large dataset is worked off in steps between other events, and takes seconds.
    """

    def __init__(self, runner: Runner, datasets: Datasets, quotas: Quotas, hole_records: HoleRecords) -> None:
        self._runner, self._datasets = runner, datasets
        self._quotas, self._hole_records = quotas, hole_records
        self._ids = itertools.count(1)
        self._waiting: list[tuple[Callable[[], bool], Callable[[], None]]] = []
        """At most one for each reader and control call."""
        runner.listeners.append(self._heard)

    def next_id(self) -> int:
        """Return a new number for a job; a reader's job has the reader's number."""
        return next(self._ids)

    def declare(self, job: int, dataset: ServedDataset, user: int, gradual: bool = False) -> None:
        """Claim a dataset for a job, on behalf of a user.

        `gradual`: the core takes up a large dataset between other events. Until `Claims.claimed` (see `after`) the job must
        not name its extents.
        """
        dataset = self._datasets.admit(dataset)  # it may have been unloaded again
        quotas = self._quotas_of(dataset, user)
        claim = events.DatasetDeclared(
            job,
            dataset.id,
            dataset.extents,
            user,
            *quotas,
            gradual,
            dataset.sample_bytes,
            dataset.made_from,
            dataset.uneven,
        )
        self._runner.handle(claim)

    def pin(self, dataset: ServedDataset, user: int, gradual: bool) -> None:
        """Keep a declared dataset, within the quotas of its user and data. The daemon's own user pins without quota."""
        if user == os.geteuid():
            self._runner.handle(events.Pinned(dataset.id, gradual))
        else:
            self._runner.handle(events.Pinned(dataset.id, gradual, user, *self._quotas_of(dataset, user)))

    def quotas_changed(self) -> None:
        """Give the claimed datasets the quotas that hold now."""
        for name, state in tuple(self._runner.node.policy.shares.datasets.items()):
            if (dataset := self._datasets.known(name)) is not None:
                users = {state.user, *(state.unpinned or ())[:1]}
                of_users = {user: self._quotas.of_user(user) for user in users}
                quota_bytes = self._quotas.of_dataset(dataset.catalog.uri_prefix)
                self._runner.handle(events.QuotasChanged(name, quota_bytes, of_users))

    def check_share(self, dataset: ServedDataset, user: int) -> None:
        """Raise OutOfSpace where a user's claims would have more extents than twice what they leave free.

        Several users thus get a fair share, and a single user two thirds. The daemon's own user has no limit, and a dataset
        that is already claimed costs nothing more.
        """
        claimed, own = self._runner.node.policy.shares.datasets, os.geteuid()
        if user == own or dataset.id in claimed:
            return
        extents: Counter[int] = Counter()
        for each in claimed.values():
            extents[each.user] += len(each.extents)
        held, more = extents[user], len(dataset.sizes)
        if held + more > 2 * (MAX_CLAIMED_EXTENTS - extents.total() + extents[own] - more):
            raise OutOfSpace(
                f"user {user} reads datasets of {held:,} extents, and has no room for {more:,} more: close or unpin some,"
                " or open them with larger extents (extent_bytes=)"
            )

    def refill_holes(self, dataset: ServedDataset) -> None:
        """Fill a dataset's copies with holes again, since missing objects may be there by now."""
        for extent, tier in self._hole_records.due(dataset.index_of):
            self._runner.handle(events.FillAgain(extent, tier))

    def after(self, done: Callable[[DatasetId], bool], dataset: DatasetId, then: Callable[[], None]) -> None:
        """Call `then` as soon as `done(dataset)` is true, at once where it already is. `done` is `claimed`, `settled` or
        `evicted` of `node.claims`."""
        self._waiting.append((partial(done, dataset), then))
        self._run_due()

    def _quotas_of(self, dataset: ServedDataset, user: int) -> tuple[int | None, int | None]:
        return self._quotas.of_dataset(dataset.catalog.uri_prefix), self._quotas.of_user(user)

    def _heard(self, event: Event) -> None:
        # A claim may have completed a gradual one of the same dataset.
        if self._waiting and isinstance(event, (events.Tick, events.DatasetDeclared)):
            self._run_due()

    def _run_due(self) -> None:
        """Run the callbacks whose conditions hold, in the order in which they were added."""
        waiting, self._waiting = self._waiting, []
        for condition, then in waiting:
            if condition():
                then()
            else:
                self._waiting.append((condition, then))
