"""The only place where core meets IO: events in, commands out, executed on tiers, fillers and sockets."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

from cachesvc.core import commands, events
from cachesvc.core.commands import Command
from cachesvc.core.errors import CacheError, OutOfSpace
from cachesvc.core.events import Event
from cachesvc.core.model import RAM, DatasetId, ExtentId, ReaderId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.stalls import StallReport, Stalls
from cachesvc.core.tiering.budgets import working
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.access.tenants import NOBODY, Peer, admits
from cachesvc.daemon.datasets import Dataset, Datasets, check_share, unknown
from cachesvc.daemon.disks.budgets import Budgets
from cachesvc.daemon.disks.closing import CLOSE_S, ENDS_S, close_tier, ended, leave
from cachesvc.daemon.disks.memory_pressure import Pressure
from cachesvc.daemon.disks.opening import Opening
from cachesvc.daemon.disks.renewal import Successor
from cachesvc.daemon.disks.watch import Watch
from cachesvc.daemon.fills.build_queue import Builds
from cachesvc.daemon.fills.checks import Checks, Good
from cachesvc.daemon.fills.commits import Commits
from cachesvc.daemon.fills.fills import Fills
from cachesvc.daemon.fills.missing_objects import Lacking
from cachesvc.daemon.fills.pool import Fillers
from cachesvc.daemon.grants.deferred_close import Disposal
from cachesvc.daemon.grants.granting import Granting
from cachesvc.daemon.grants.holds import Holds
from cachesvc.daemon.grants.plans import Entries, Plans
from cachesvc.daemon.grants.readers import Known
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.loop.settling import Settling
from cachesvc.sources.resilient import SourceCounters
from cachesvc.tiers.probe import Room
from cachesvc.tiers.ram import RamTier
from cachesvc.tiers.tier import Tier

log = logging.getLogger(__name__)


class Runner:
    """Executes what `Node.handle` commands. Everything runs on the loop's thread, except tier calls that may
    wait for a disk: each tier has threads of its own, so a slow disk delays only itself, and what waits for one
    that is lost is answered without it. A call that ends after that finds its command forgotten."""

    def __init__(
        self,
        node: Node,
        ram_tier: RamTier,
        disks: Sequence[Opening],
        datasets: Datasets,
        fillers: Fillers,
        loop: Loop,
        clock: Callable[[], float],
        budgets: Budgets,
    ) -> None:
        self.node = node
        self.datasets = datasets
        self.loop = loop
        self.stalls: dict[DatasetId, Stalls] = {}
        self.quotas = Quotas(())
        self.hangs = False
        """After `close`: a thread waits for a disk, and this process cannot end before that answers."""
        self.disks = {each.disk.name: each.disk for each in disks}
        self._tiers: dict[TierName, Tier] = {
            name: disk.tier for name, disk in self.disks.items() if disk.tier is not None
        }
        """Those that are open: the core asks nothing of a lost one that never was."""
        if RAM in node.policy.tiers:
            self._tiers[RAM] = ram_tier
        self._lanes = {name: self._lane(f"tier-{name}", clock) for name in node.policy.tiers}
        self._openers = {name: self._lane(f"open-{name}", clock) for name in self.disks}
        self._committers = {name: self._lane(f"commit-{name}", clock) for name in self.disks}
        self._commits = Commits(self._committers, self._lanes)
        self._budgets = budgets
        ram = node.policy.tiers.get(RAM)
        work = budgets.of_fills(ram)
        self._pressure = Pressure(
            ram, budgets, work, self._lane("memory", clock), clock, partial(self._resized, RAM)
        )
        self.watch = Watch(self._tier_lost, self._tier_back, self._measured, self._tier_stalled, clock)
        for each in disks:
            name = each.disk.name
            calls = self._lanes[name], self._openers[name], self._committers[name]
            self.watch.add(each.disk, each.probes, calls, partial(fillers.busy_s, name))
        self.checks = Checks(node, self._tiers, self._openers, fillers, self.handle, self.watch.suspect)
        self.lacking = Lacking(clock)
        self.fills = Fills(
            self._tiers,
            self._lanes,
            self._commits,
            datasets,
            fillers,
            self.checks,
            self.lacking,
            self.handle,
            work,
        )
        self.granting = Granting(self._tiers, self.checks, self.lacking, self.handle, self.next_id)
        self.plans = Plans(self._lane("plans", clock))
        self.disposal = Disposal()
        self._holds = Holds(node, self.handle)
        self._settling = Settling()
        self.builds = Builds(fillers.build)
        self._fillers = fillers
        self._clock = clock
        self._ids = itertools.count(1)
        self._execute: dict[type[Command], Callable[..., None]] = {
            commands.StartFill: self.fills.start,
            commands.Grant: self.granting.grant,
            commands.Recall: self.granting.recall,
            commands.Refuse: self.granting.refuse,
            commands.Fail: self.granting.fail,
            commands.Evict: self._evict,
            commands.Verify: self._scrub,
        }

    @property
    def grants(self) -> GrantsServer | None:
        """Where readers speak; None before it is there."""
        return self.granting.server

    def next_id(self) -> int:
        """A number for a job, reader or plan, never used before."""
        return next(self._ids)

    def count_from(self, first: int) -> None:
        """Never give a number below `first`: another daemon used them."""
        self._ids = itertools.count(first)

    def handle(self, event: Event) -> None:
        """Give an event to the core and carry out its commands."""
        for command in self.node.handle(event, self._clock()):
            self._execute[type(command)](command)

    def recovered(self, event: events.Recovered) -> None:
        """What a tier held at start; what is on a disk is verified before its first grant. Nobody can have changed
        sealed memory."""
        if event.tier != RAM:
            self.checks.unverified[event.tier].update(event.extents)
        self.handle(event)

    def tick(self) -> None:
        """What the loop calls at `next_deadline`."""
        now = self._clock()
        if self.watch.next_deadline() <= now:
            self.watch.tick()
        self._pressure.tick(now)
        if self.node.next_deadline() <= now:
            self.handle(events.Tick())
            self._settling.tell()

    def next_deadline(self) -> float:
        """When the core or a watch wants to be called, in seconds of the clock; inf where none does."""
        return min(self.node.next_deadline(), self.watch.next_deadline(), self._pressure.next_deadline())

    def declare(
        self,
        job: int,
        dataset: Dataset,
        user: int | None = None,
        gradual: bool = False,
    ) -> None:
        """A job claims a dataset: a reader for the user at its connection, others for the one that is given.

        `gradual`: a large one is taken up between other events. Until that is done (`after`, `Claims.claimed`) the job
        must not name its extents.
        """
        dataset = self.datasets.admit(dataset)  # it may have been forgotten since it was loaded
        if user is None:
            user = self.grants.user_of(ReaderId(job)) if self.grants else NOBODY
        of_dataset, of_user = self.quotas.of_dataset(dataset.catalog.uri_prefix), self.quotas.of_user(user)
        claim = events.DatasetDeclared(job, dataset.id, dataset.extents, user, of_dataset, of_user, gradual)
        self.handle(claim)
        self._settling.tell()  # who waits for a gradual one that this one finished

    def ask_again(self, dataset: Dataset) -> None:
        """Somebody opens a dataset anew: what its copies lack may be there by now."""
        for extent, tier in self.lacking.due(dataset.index_of):
            self.handle(events.FillAgain(extent, tier))

    def after(self, done: Callable[[DatasetId], bool], dataset: DatasetId, then: Callable[[], None]) -> None:
        """Call `then` on the loop's thread when `done` (`claimed`, `settled` or `evicted` of `node.claims`) says that
        nothing of its kind is under way for a dataset."""
        self._settling.add(partial(done, dataset), then)

    def after_tiers(self, then: Callable[[], None]) -> None:
        """Call `then` on the loop's thread when the tiers have done all that they were told before: commits, evictions. A
        lost one owes none."""
        owing = {name for name, tier in self.node.policy.tiers.items() if not tier.lost}

        def done(name: TierName, _: object = None) -> None:
            owing.discard(name)
            if not owing:
                then()

        for name in tuple(owing):
            self._after_calls(name, lambda: None, partial(done, name))
        if not owing:
            then()

    def _after_calls(self, name: TierName, work: Callable[[], None], then: Callable[[object], None]) -> None:
        """Run `work` when all calls on a tier that were told before are over, then `then`."""
        last = partial(self._lanes[name].submit, work, then, then)
        committer = self._committers.get(name)
        if committer is None:
            last()
        else:
            committer.submit(lambda: None, lambda _: last(), lambda _: last())

    def asked(self) -> SourceCounters:
        """What was asked of the sources since this daemon started."""
        return self._fillers.asked

    def left_alone(self) -> dict[str, int]:
        """How often each peer was left alone for a while, since it did not answer or sent nonsense."""
        return self._fillers.left_alone

    def listed(self) -> list[Dataset]:
        """The datasets to tell of: without those that are only read to be indexed, once that is over. On the loop's
        thread."""
        return [
            each
            for each in self.datasets.all()
            if not each.provisional or (self.grants is not None and self.grants.readers_of(each.id))
        ]

    def resident(self, dataset: Dataset) -> list[tuple[ExtentId, TierName]]:
        """A dataset's extents that could be granted now, and from which tier."""
        found = ((extent, self.node.where(extent)) for extent in dataset.extent_ids)
        return [(extent, tier) for extent, tier in found if tier is not None]

    def resident_bytes(self, dataset: Dataset) -> int:
        """Their bytes."""
        return dataset.bytes_of(extent for extent, _ in self.resident(dataset))

    def out_of_reach(self, dataset: Dataset) -> list[ExtentId]:
        """A dataset's extents in lost tiers, where no eviction reaches them."""
        lost = [tier for tier in self.node.policy.tiers.values() if tier.lost]
        entries = self.node.copies.entries

        def held(extent: ExtentId) -> bool:
            entry = entries.get(extent)
            copies = tuple(entry.copies) if entry else ()
            return any(copy.tier.lost for copy in copies) or any(extent in tier.dormant for tier in lost)

        return [extent for extent in dataset.extent_ids if held(extent)] if lost else []

    def close(self) -> None:
        """Finish what the tiers' threads are doing, not what they were to do next, and close the tiers. Of those that
        wait for a disk for longer, `hangs` tells."""
        self._pressure.close()
        self.plans.close()
        self.watch.close(0.0)
        lanes = [*self._openers.values(), *self._lanes.values(), *self._committers.values()]
        for lane in lanes:
            lane.close(0.0)
        deadline = time.monotonic() + CLOSE_S
        closed = [self._close(name, deadline) for name in self._lanes]
        self.hangs = not all([*closed, self.watch.close(ENDS_S), ended(lanes)])

    def _close(self, name: TierName, deadline: float) -> bool:
        """False where a tier does not close in time. A lost one is not asked to."""
        calls = [lanes[name] for lanes in (self._lanes, self._committers) if name in lanes]
        lost = self.node.policy.tiers[name].lost
        if not lost and close_tier(self._tiers[name], calls, deadline):
            return True
        return name in self.disks and leave(self.disks[name]) and lost

    # What readers say (readers.Answers).

    def connected(
        self, reader: ReaderId, dataset: DatasetId, then: Callable[[Known | CacheError], None]
    ) -> None:
        """Load a dataset off the loop, declare it in the reader's name, and say so."""

        def declared(known: Dataset) -> None:
            if self.grants is not None and self.grants.here(reader):
                then(known)

        def loaded(future: Future[Dataset]) -> None:
            if self.grants is None or not self.grants.here(reader):
                return  # gone meanwhile: a claim in its name would never end
            error = future.exception() or self._refusal(future.result(), self.grants.peer(reader))
            if error is None:
                known = self.datasets.admit(future.result())
                self.declare(reader, known, gradual=True)
                self.after(self.node.claims.claimed, known.id, partial(declared, known))
            elif isinstance(error, CacheError):
                then(error)
            else:
                log.error("a catalog cannot be loaded", extra={"dataset": dataset, "error": str(error)})
                then(CacheError(f"the catalog of dataset {dataset} cannot be loaded: {error}"))

        self.datasets.load(dataset).add_done_callback(lambda f: self.loop.post(lambda: loaded(f)))

    def _refusal(self, dataset: Dataset, peer: Peer) -> CacheError | None:
        """Why a user may not have a dataset."""
        if not admits(dataset.rules, peer):
            return unknown(dataset.id)
        try:
            check_share(self.node, dataset, peer.uid)
        except OutOfSpace as error:
            return error
        return None

    def held(self, reader: ReaderId, extent: ExtentId, size_bytes: int) -> None:
        """HOLD."""
        user = self.grants.user_of(reader) if self.grants else NOBODY
        self._holds.said(reader, user, self.quotas.of_user(user), extent, size_bytes)

    def suspected(self, extent: ExtentId) -> None:
        """SUSPECT."""
        self.checks.doubt(extent)

    def passed_or_gone(self, reader: ReaderId, step: int | None) -> None:
        """PASSED, or the end of a reader: of its leases, its plan and its claim, in this order."""
        if step is not None:
            self.handle(events.Passed(reader, step))
            return
        self.handle(events.ReaderGone(reader))
        self.handle(events.PlanEnded(reader))
        self.handle(events.JobEnded(reader))

    def rooms(self) -> list[int]:
        """Of the tiers that work."""
        return [tier.budget_bytes for tier in working(self.node.policy.tiers)]

    def planned(self, reader: ReaderId, plan: Entries) -> None:
        """PLAN, read."""
        launch = self.grants.job_of(reader) if self.grants else 0
        user = self.grants.user_of(reader) if self.grants else NOBODY
        self.handle(events.Planned(reader, reader, plan.entries, plan.following, launch=launch, user=user))

    def waited(self, dataset: DatasetId, report: StallReport) -> None:
        """A rank says what its steps waited for."""
        self.stalls.setdefault(dataset, Stalls()).add(report)

    # What the core commands.

    def _evict(self, command: commands.Evict) -> None:
        tier = self._tiers[command.tier]

        def evicted(_: object) -> None:
            if self._tiers[command.tier] is not tier:
                return  # forgotten: its tier has another directory
            self.checks.unverified[command.tier].discard(command.extent)
            self.lacking.evicted(command.extent, command.tier)
            self.handle(events.Evicted(command.extent, command.tier))

        def failed(error: CacheError) -> None:  # the copy is forgotten; its file shows up at a start
            log.warning("an eviction failed", extra={"tier": command.tier, "error": str(error)})
            self.checks.suspect(command.tier, error)
            evicted(None)

        lane = self._commits.after(command.extent, command.tier)
        lane.submit(lambda: tier.evict(command.extent), evicted, failed)

    def _scrub(self, command: commands.Verify) -> None:
        def checked(good: Good) -> None:
            self.handle(events.Verified(command.extent, command.tier, good is not None))

        self.checks.verify(command.extent, command.tier, checked)

    # What the watch over the disks finds.

    def _tier_stalled(self, name: TierName, stalled: bool) -> None:
        """Fills go elsewhere until the disk answers or is lost, in fillers that do not wait for it."""
        log.warning("a disk %s", "does not answer" if stalled else "answers again", extra={"tier": name})
        self.handle(events.Stalled(name, stalled))
        if stalled:
            self._fillers.leave(name)
            self.fills.leave(name, "it does not answer")

    def _tier_lost(self, name: TierName, why: str) -> None:
        """Answer all that waits for the tier; what its threads still do is undone behind them."""
        log.error("a tier is left alone", extra={"tier": name, "why": why})
        self.handle(events.TierLost(name))
        self.fills.tier_lost(name, why)
        self.granting.tier_lost(name)
        self._fillers.tier_lost(name)  # last: the jobs that this answers find all of the above done

    def _tier_back(self, name: TierName) -> None:
        successor = self.disks[name].take()
        if successor is not None:
            self._renew(name, successor)
        log.info("a tier works again", extra={"tier": name})
        self.checks.came_back(name)
        self.handle(events.TierBack(name))

    def _renew(self, name: TierName, successor: Successor) -> None:
        """Go on in another directory; the old one, if there was one, is closed when no call of it is left."""
        old, self._tiers[name] = self._tiers.get(name), successor.tier
        log.warning("another cache directory", extra={"tier": name, "extents": len(successor.extents)})
        self.checks.renewed(name)
        self.lacking.renewed(name)
        self._budgets.renewed(name)
        self.handle(events.Renewed(name, successor.extents))
        self._measured(name, successor.room)
        if old is None:
            return
        close = partial(self._after_calls, name, old.close, lambda _: None)
        self._openers[name].submit(lambda: None, lambda _: close(), lambda _: None)

    def _measured(self, name: TierName, room: Room) -> None:
        if not room.total_bytes:
            return  # nobody can say
        tier = self.node.policy.tiers[name]
        budget_bytes = self._budgets.measured(name, room, tier.used_bytes)
        if budget_bytes != tier.given_bytes:
            self._resized(name, budget_bytes)

    def _resized(self, name: TierName, budget_bytes: int) -> None:
        self.handle(events.Resized(name, budget_bytes))

    def _lane(self, name: str, clock: Callable[[], float]) -> Lane:
        return Lane(name, self.loop.post, clock)
