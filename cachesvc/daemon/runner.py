"""The place where the core meets IO: events in, commands out, executed on tiers, fillers and sockets."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from cachesvc.core import commands, events
from cachesvc.core.commands import Command
from cachesvc.core.events import Event
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.stalls import Stalls
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.access.tenants import NO_USER
from cachesvc.daemon.datasets import Datasets, ServedDataset
from cachesvc.daemon.disks.budgets import Budgets
from cachesvc.daemon.disks.closing import ENDS_S
from cachesvc.daemon.disks.memory_pressure import MemoryPressure
from cachesvc.daemon.disks.opening import DirectoryOpening
from cachesvc.daemon.disks.reactions import DiskReactions
from cachesvc.daemon.disks.tier_threads import TierThreads
from cachesvc.daemon.disks.watch import DiskWatch
from cachesvc.daemon.fills.build_queue import BuildQueue
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.commits import Commits
from cachesvc.daemon.fills.evictions import Evictions
from cachesvc.daemon.fills.fill import FillParts
from cachesvc.daemon.fills.fills import Fills
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.fills.shared_fills import SharedFills
from cachesvc.daemon.grants.granting import Granting
from cachesvc.daemon.grants.plan_intake import PlanIntake
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.deferred import DeferredCallbacks
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.loop.loop import Loop
from cachesvc.sources.resilient import SourceCounters
from cachesvc.tiers.ram import RamTier

if TYPE_CHECKING:
    from cachesvc.daemon.peers.cluster_link import ClusterLink


class Runner:
    """Executes the commands of `Node.handle` on the loop's thread.

    Tier calls that may wait for a disk run on threads of that tier, so a slow disk delays only itself. Calls for a
    lost tier are answered without it; the result of a call that ends later is ignored.
    """

    def __init__(
        self,
        node: Node,
        ram_tier: RamTier,
        disks: Sequence[DirectoryOpening],
        datasets: Datasets,
        fillers: FillerPool,
        loop: Loop,
        clock: Callable[[], float],
        budgets: Budgets,
        quotas: Quotas,
    ) -> None:
        self.node = node
        self.datasets = datasets
        self.loop = loop
        self.quotas = quotas
        self.stalls: dict[DatasetId, Stalls] = {}
        self.hangs = False
        """After `close`: a thread waits for a disk, and this process cannot end before the disk answers."""
        self.disks = {each.disk.name: each.disk for each in disks}
        self.cluster: ClusterLink | None = None
        self._fillers = fillers
        self._clock = clock
        self._ids = itertools.count(1)
        self._deferred = DeferredCallbacks()
        self._threads = threads = TierThreads(list(node.policy.tiers), self.disks, self._lane)
        tiers = threads.open_tiers
        tiers |= {name: disk.tier for name, disk in self.disks.items() if disk.tier is not None}
        ram = node.policy.tiers.get(RAM)
        if ram is not None:
            tiers[RAM] = ram_tier
        fill_memory = budgets.fill_memory(ram)
        self._pressure = MemoryPressure(
            ram, budgets, fill_memory, self._lane("memory"), clock, self._ram_resized
        )
        commits = Commits(threads.committers, threads.calls)
        self.checks = Checks(node, tiers, threads.openers, fillers, self.handle, self._suspect)
        self.hole_records = hole_records = HoleRecords(clock)
        self.shared_fills = SharedFills()
        self.fills = Fills(
            FillParts(
                tiers,
                threads.calls,
                commits,
                datasets,
                fillers,
                self.checks,
                hole_records,
                self.handle,
                fill_memory,
                self.shared_fills,
            )
        )
        self.granting = Granting(tiers, self.checks, hole_records, self.handle, self.next_id)
        self.builds = BuildQueue(fillers.build)
        self.plans = PlanIntake(self._lane("plans"))
        reactions = DiskReactions(
            node,
            self.disks,
            threads,
            budgets,
            fillers,
            self.fills,
            self.checks,
            self.granting,
            hole_records,
            self.handle,
        )
        self.watch = DiskWatch(reactions.lost, reactions.back, reactions.measured, reactions.stalled, clock)
        for each in disks:
            name = each.disk.name
            self.watch.add(each.disk, each.probes, threads.of(name), partial(fillers.busy_s, name))
        evictions = Evictions(tiers, commits, self.checks, hole_records, self.handle)
        self._execute: dict[type[Command], Callable[..., None]] = {
            commands.StartFill: self.fills.start,
            commands.Grant: self.granting.grant,
            commands.Recall: self.granting.recall,
            commands.Refuse: self.granting.refuse,
            commands.Fail: self.granting.fail,
            commands.Evict: evictions.evict,
            commands.Verify: self.checks.scrub,
        }

    @property
    def grants(self) -> GrantsServer | None:
        """The grants socket; None before it is open."""
        return self.granting.server

    def next_id(self) -> int:
        """Return a new number for a job, reader or plan."""
        return next(self._ids)

    def handle(self, event: Event) -> None:
        """Give an event to the core and execute its commands."""
        for command in self.node.handle(event, self._clock()):
            self._execute[type(command)](command)
        if self.cluster is not None:
            self.cluster.handled(event)

    def recovered(self, event: events.Recovered) -> None:
        """Tell the core what a tier holds at the start. Copies on disks are verified before their first grant; sealed
        memory cannot have changed."""
        if event.tier != RAM:
            self.checks.unverified[event.tier].update(event.extents)
        self.handle(event)

    def tick(self) -> None:
        """Run the work that is due; the loop calls this at `next_deadline`."""
        now = self._clock()
        if self.watch.next_deadline() <= now:
            self.watch.tick()
        self._pressure.tick(now)
        if self.cluster is not None:
            self.cluster.tick(now)
        if self.node.next_deadline() <= now:
            self.handle(events.Tick())
            self._deferred.run_due()

    def next_deadline(self) -> float:
        """The time at which `tick` is due, in seconds of the clock; inf without a deadline."""
        due = min(self.node.next_deadline(), self.watch.next_deadline(), self._pressure.next_deadline())
        return due if self.cluster is None else min(due, self.cluster.next_deadline())

    def declare(
        self,
        job: int,
        dataset: ServedDataset,
        user: int | None = None,
        gradual: bool = False,
    ) -> None:
        """Claim a dataset for a job, on behalf of `user` or else of the user of the reader with the job's number.

        `gradual`: the core takes up a large dataset between other events. Until `Claims.claimed` (see `after`) the job must
        not name its extents.
        """
        dataset = self.datasets.admit(dataset)  # it may have been unloaded again
        if user is None:
            user = self.grants.user_of(ReaderId(job)) if self.grants else NO_USER
        of_dataset, of_user = self.quotas.of_dataset(dataset.catalog.uri_prefix), self.quotas.of_user(user)
        claim = events.DatasetDeclared(
            job, dataset.id, dataset.extents, user, of_dataset, of_user, gradual, dataset.sample_bytes
        )
        self.handle(claim)
        self._deferred.run_due()  # this claim may have completed a gradual one of the same dataset

    def refill_holes(self, dataset: ServedDataset) -> None:
        """Fill a dataset's copies with holes again, since missing objects may be there by now."""
        for extent, tier in self.hole_records.due(dataset.index_of):
            self.handle(events.FillAgain(extent, tier))

    def after(self, done: Callable[[DatasetId], bool], dataset: DatasetId, then: Callable[[], None]) -> None:
        """Call `then` on the loop's thread as soon as `done(dataset)` is true. `done` is `claimed`, `settled` or `evicted`
        of `node.claims`."""
        self._deferred.add(partial(done, dataset), then)

    def after_tiers(self, then: Callable[[], None]) -> None:
        """Call `then` on the loop's thread when the tiers have finished their earlier commits and evictions, those of
        lost tiers excepted."""
        self._threads.after_all([n for n, tier in self.node.policy.tiers.items() if not tier.lost], then)

    def source_requests(self) -> SourceCounters:
        """Counts of the requests to sources since this daemon started."""
        return self._fillers.source_requests

    def listed(self) -> list[ServedDataset]:
        """The datasets to list: all loaded ones except provisional ones without readers. Runs on the loop's thread."""
        return [
            each
            for each in self.datasets.all()
            if not each.provisional or (self.grants is not None and self.grants.readers_of(each.id))
        ]

    def resident(self, dataset: ServedDataset) -> list[tuple[ExtentId, TierName]]:
        """A dataset's extents that can be granted now, each with its tier."""
        found = ((extent, self.node.where(extent)) for extent in dataset.extent_ids)
        return [(extent, tier) for extent, tier in found if tier is not None]

    def resident_bytes(self, dataset: ServedDataset) -> int:
        """Bytes of a dataset's extents that can be granted now."""
        return dataset.bytes_of(extent for extent, _ in self.resident(dataset))

    def out_of_reach(self, dataset: ServedDataset) -> list[ExtentId]:
        """A dataset's extents in lost tiers, from which they cannot be evicted."""
        lost = [tier for tier in self.node.policy.tiers.values() if tier.lost]
        entries = self.node.copies.entries

        def held(extent: ExtentId) -> bool:
            entry = entries.get(extent)
            copies = tuple(entry.copies) if entry else ()
            return any(copy.tier.lost for copy in copies) or any(extent in tier.dormant for tier in lost)

        return [extent for extent in dataset.extent_ids if held(extent)] if lost else []

    def close(self) -> None:
        """Close the tiers after the calls under way, and end all threads; later calls are dropped. Sets `hangs`."""
        self._pressure.close()
        self.plans.close()
        self.watch.close(0.0)
        self._threads.stop()
        closed = self._threads.close_tiers({n for n, tier in self.node.policy.tiers.items() if tier.lost})
        self.hangs = not all([closed, self.watch.close(ENDS_S), self._threads.ended()])

    def _ram_resized(self, budget_bytes: int) -> None:
        self.handle(events.Resized(RAM, budget_bytes))

    def _suspect(self, tier: TierName) -> None:
        self.watch.suspect(tier)

    def _lane(self, name: str) -> Lane:
        return Lane(name, self.loop.post, self._clock)
