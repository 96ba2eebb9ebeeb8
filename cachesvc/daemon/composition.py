"""The composition root: builds the parts of the daemon, room by room, and hands each what it needs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial

from cachesvc.config import GRANTS_SOCKET, Settings, most_callers, most_in_ram, most_readers
from cachesvc.core import commands
from cachesvc.core.model import RAM
from cachesvc.core.node.node import Node
from cachesvc.core.placement.place_search import Hedges
from cachesvc.core.tiering.policy import NodeSettings
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.access.tenants import Tenants
from cachesvc.daemon.access.tls import CertificateWatch
from cachesvc.daemon.claims import DatasetClaims
from cachesvc.daemon.control.callers import Callers
from cachesvc.daemon.control.drain import Drain
from cachesvc.daemon.control.history import History
from cachesvc.daemon.control.late_evictions import LateEvictions
from cachesvc.daemon.control.pins import PinFile, Pins
from cachesvc.daemon.control.prefetch_runs import PrefetchRuns
from cachesvc.daemon.control.prefetches import Prefetches
from cachesvc.daemon.control.reports import Reports
from cachesvc.daemon.control.server import ControlServer
from cachesvc.daemon.control.service import Service
from cachesvc.daemon.datasets import Datasets
from cachesvc.daemon.disks.budgets import LEAST_EXTENTS, Budgets, MemoryPressure
from cachesvc.daemon.disks.opening import (
    begun_openings,
    report_recovered,
    tiers_at_start,
    wait_until_open,
    weight_bytes,
)
from cachesvc.daemon.disks.reactions import DiskReactions
from cachesvc.daemon.disks.tier_threads import TierThreads
from cachesvc.daemon.disks.watch import DiskWatch
from cachesvc.daemon.events.journal import Journal
from cachesvc.daemon.fills.build_queue import BuildQueue
from cachesvc.daemon.fills.checks import Checks
from cachesvc.daemon.fills.fill_memory import FillMemory
from cachesvc.daemon.fills.fill_parts import Commits, FillParts
from cachesvc.daemon.fills.fills import Fills
from cachesvc.daemon.fills.holes import HoleRecords
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.fills.preparers import Preparers
from cachesvc.daemon.fills.sent_bytes import SentBytes
from cachesvc.daemon.fills.shared_fills import SharedFills
from cachesvc.daemon.grants.bypass import Bypass
from cachesvc.daemon.grants.granting import Granting
from cachesvc.daemon.grants.plan_intake import PlanIntake
from cachesvc.daemon.grants.reader_events import ReaderEvents
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.metrics.scrape_server import Health
from cachesvc.daemon.object_parts import ObjectParts
from cachesvc.daemon.own_directories import OwnDirectories
from cachesvc.daemon.parent.messages import CopyHeld
from cachesvc.daemon.parent.parent_link import ParentLink, adopt_copies
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.daemon.peers.lending import Lending
from cachesvc.daemon.peers.relays import Relays
from cachesvc.daemon.peers.taken_extents import TakenExtents
from cachesvc.daemon.processes.threads import ThreadPool
from cachesvc.daemon.reload.reloader import LiveParts, Reloader
from cachesvc.daemon.residency import in_use, is_claimed
from cachesvc.daemon.runner import Runner
from cachesvc.sources.uri import Allowlist
from cachesvc.system.footprint import FILLS, largest_ram_bytes
from cachesvc.system.memory import allowed_bytes
from cachesvc.tiers.ram import RamTier

log = logging.getLogger(__name__)
DRAIN_S = 10.0
"""The longest wait for fills under way when another daemon replaces this one. Those that take longer are begun again by the
next daemon."""
POLL_S = 0.02


class Composition:
    """Call `access`, `events`, `datasets`, `tiers`, `fills`, `readers`, `reload` and `control` in this order. `ending`
    collects the steps that undo them at the end or after a failed start. No part is given this object."""

    def __init__(
        self, settings: Settings, loop: Loop, fillers: FillerPool, open_files: int, ending: ExitStack
    ) -> None:
        self._settings, self._loop, self._fillers = settings, loop, fillers
        self._open_files, self._ending = open_files, ending
        self._state_dir = settings.state_dir
        self._health: Health | None = None
        self.stop: Callable[[], None] = loop.stop
        """Ends `run`, after a drain where --drain-on-stop says so. Runs on the loop's thread."""

    def access(self, allowed: Allowlist, lookups: Lookups) -> None:
        """Build what knows who may use which data, and how much of it. Raises InvalidInput for what the settings get
        wrong."""
        self._lookups = lookups
        self._quotas = Quotas(self._settings.quota, lambda prefix: lookups.resolve(prefix, "--quota"))
        self._tenants = Tenants(allowed, self._settings.rules)

    def events(self) -> None:
        """Keep events from here on. No other daemon writes the journal."""
        self._journal = Journal(self._state_dir)
        self._ending.callback(self._journal.close)
        self._journal.start()

    def datasets(self) -> None:
        """Build what knows the datasets. No other daemon runs from here on."""
        loader = ThreadPool(2, "catalogs")
        self._datasets = Datasets(f"{self._state_dir}/catalogs", self._tenants, self._lookups, loader)
        self._ending.callback(self._datasets.close)
        self._ending.callback(loader.shutdown, wait=False)

    def tiers(self, parent: ParentLink, held: Sequence[tuple[CopyHeld, int]]) -> None:
        """Open the tiers, and build the core and the threads of the tiers."""
        settings = self._settings
        ram = RamTier(RAM, most_in_ram(self._open_files), parent)
        self._openings = begun_openings(settings, self._lane)
        in_ram = adopt_copies(ram, settings.ram_bytes, held)  # while they go on
        self._lost = wait_until_open(self._openings)
        specs, self._recovered = tiers_at_start(settings, self._openings, self._lost, in_ram)
        fills = settings.fillers * FILLS
        core = NodeSettings(
            max_fills=fills,
            fill_bytes=(fills - 1) * settings.extent_bytes,
            scrub_bytes_per_s=settings.scrub_rate,
            unplanned_share=settings.unplanned_share,
            preparing=settings.preparing,
            share_prepared=settings.cluster is not None and settings.cluster.share_prepared,
        )
        node = Node(specs, core)
        self._datasets.claimed, self._datasets.used = partial(is_claimed, node), partial(in_use, node)
        self._runner = Runner(node, time.monotonic)
        self._threads = TierThreads(node.policy.tiers, ram, self._openings, self._lane)
        self._ending.callback(self._threads.close)
        self._ending.callback(self._fillers.stop)
        nvme = {each.disk.name: spec for each, spec in zip(self._openings, settings.nvme, strict=True)}
        self._budgets = Budgets(nvme)

    def fills(self) -> None:
        """Build what fills, checks and evicts extents, and the link to the peer agent."""
        runner, threads = self._runner, self._threads
        node, tiers = runner.node, threads.open_tiers
        ram, work_bytes = node.policy.tiers.get(RAM), self._settings.work_bytes
        together_bytes = largest_ram_bytes(allowed_bytes(), self._settings.own_bytes) + work_bytes
        memory = FillMemory(work_bytes, together_bytes, ram)
        least_bytes = LEAST_EXTENTS * self._settings.extent_bytes
        self._pressure = MemoryPressure(
            ram, least_bytes, memory, self._lane("memory"), time.monotonic, runner.handle
        )
        self._ending.callback(self._pressure.close)
        self._holes, shared = HoleRecords(time.monotonic), SharedFills(Hedges(self._fillers.hedges))
        self._preparers = Preparers(runner.handle, time.monotonic)
        self._checks = Checks(
            node, tiers, threads.openers, self._fillers, runner.handle, lambda tier: self._watch.suspect(tier)
        )
        self._object_parts = ObjectParts(self._datasets, self._settings.s3_part_bytes)
        parts = FillParts(
            tiers,
            threads.calls,
            Commits(threads.committers, threads.calls),
            self._datasets,
            self._fillers,
            self._checks,
            self._holes,
            runner.handle,
            memory,
            shared,
            self._preparers,
        )
        self._cluster: ClusterLink | None = None
        self._sent: SentBytes | None = None
        if self._settings.cluster is not None:
            parts.sent = self._sent = SentBytes(
                self._settings.cluster.compared_share,
                node,
                runner.handle,
                lambda: [each.name for each in self._cluster.report.members] if self._cluster else [],
                lambda: self._fillers.source_requests.throttled,
            )
            self._weight_bytes = weight_bytes(self._settings, self._openings, node.policy.tiers)
            sharing = self._settings.cluster.share_prepared
            lending = Lending(node, self._checks, shared, self._holes, self._sent.maker_of, sharing)
            self._cluster = ClusterLink(
                self._settings,
                self._weight_bytes,
                runner,
                self._loop,
                lending,
                shared,
                self._sent,
                lambda: self._fillers.source_requests,
                lambda: self._tenants.allowed,
            )
            parts.locate, parts.wrong_copy = self._cluster.locate, self._cluster.wrong_copy
            parts.judged = self._cluster.judged
        self._fills = Fills(parts)

    def readers(self) -> None:
        """Build what serves readers, and what watches the disks that it grants from."""
        runner, threads, checks = self._runner, self._threads, self._checks
        self._claims = DatasetClaims(runner, self._datasets, self._quotas, self._holes)
        requests = ReaderEvents(
            runner,
            self._loop,
            self._datasets,
            self._claims,
            self._quotas,
            checks,
            self._preparers,
            self._tenants,
            self._object_parts,
        )
        self._plans, self._requests = PlanIntake(self._lane("plans")), requests
        self._ending.callback(self._plans.close)
        self._grants = GrantsServer(
            requests,
            self._plans,
            self._loop.watch,
            self._loop.unwatch,
            self._claims.next_id,
            Bypass(f"{self._state_dir}/bypass"),
        )
        self._preparers.offer = self._grants.offer
        granting = Granting(self._grants, threads.open_tiers, checks, self._holes, runner.handle)
        runner.execute = {
            commands.StartFill: self._fills.start,
            commands.Grant: granting.grant,
            commands.Recall: self._grants.recall,
            commands.Refuse: self._grants.refuse,
            commands.Fail: self._grants.fail,
            commands.Evict: self._fills.evict,
            commands.Verify: checks.scrub,
            **({commands.FindCopy: self._cluster.find_copy} if self._cluster else {}),
        }
        reactions = DiskReactions(
            runner, threads, self._budgets, self._fillers, self._fills, checks, granting, self._holes
        )
        self._watch = DiskWatch(
            reactions.lost, reactions.back, reactions.measured, reactions.stalled, time.monotonic
        )
        for each in self._openings:
            name = each.disk.name
            busy_s = partial(self._fillers.busy_s, name)
            self._watch.add(each.disk, each.probes, threads.of(name), busy_s)
        runner.timers += [self._watch, self._pressure, self._preparers]

    def reload(self, stale: bool) -> Reloader:
        """Build what reloads the settings. `stale`: they may be older than the files."""
        disks = [each.disk.name for each in self._openings]
        live = LiveParts(
            self._loop,
            self._lookups,
            self._tenants,
            self._datasets,
            self._quotas,
            self._claims,
            self._budgets,
            self._pressure,
            self._fillers,
            disks,
        )
        self._reloader = Reloader(self._settings, live.take, stale)
        self._ending.callback(self._reloader.close)
        return self._reloader

    def control(self) -> None:
        """Tell the core what its tiers hold, build the control API and open the sockets."""
        settings, loop, runner, ending = self._settings, self._loop, self._runner, self._ending
        datasets, claims, counts, cluster = self._datasets, self._claims, self._fills.counts, self._cluster
        pins = Pins(PinFile(f"{self._state_dir}/pins.json"), runner, loop, datasets, claims)
        report_recovered(self._recovered, runner, self._checks.unverified, pins.pinned_last)
        for name, why in self._lost.items():
            self._watch.not_opened(name, why)
        grants_socket = f"{settings.socket_dir}/{GRANTS_SOCKET}"
        self._grants.listen(grants_socket, settings.socket_mode, most_readers(self._open_files))
        ending.callback(self._grants.close)
        pins.restore()
        if cluster is not None:
            ending.callback(cluster.close)
            cluster.start()
        history = History(runner.node, counts, self._fillers)
        runner.timers.append(history)
        reports = Reports(
            loop,
            runner.node,
            datasets,
            pins,
            self._grants,
            self._fills,
            self._fillers,
            cluster,
            history,
            self._journal,
        )
        prefetches = PrefetchRuns(
            f"{self._state_dir}/prefetches.json",
            Prefetches(loop, runner, claims, counts, cluster),
            datasets,
            loop,
        )
        prefetches.restore()
        service = Service(
            loop,
            runner,
            datasets,
            claims,
            Callers(self._tenants, self._lookups, self._grants.caller),
            pins,
            prefetches,
            reports,
            BuildQueue(self._fillers.build),
            self._checks,
            self._threads,
            self._journal,
            self._reloader,
            settings.extent_bytes,
            cluster,
            self._grants,
            *self._members(),
        )
        control = ControlServer(settings, service, self._grants.caller, most_callers(self._open_files))
        ending.callback(control.close)
        directories = OwnDirectories(settings, loop, self._grants, control)
        ending.callback(directories.close)
        certificate = CertificateWatch(settings.tls) if settings.tls is not None else None
        if certificate is not None:
            ending.callback(certificate.close)
            certificate.start()
        if settings.metrics:  # Prometheus's library takes 50 ms of CPU
            from cachesvc.daemon.metrics.collector import MetricsCollector
            from cachesvc.daemon.metrics.scrape_server import ScrapeServer
            from cachesvc.daemon.page.page import Page

            MetricsCollector(
                loop,
                runner.node,
                datasets,
                self._grants,
                counts,
                self._fillers,
                cluster,
                self._requests,
                self._threads,
                self._journal,
                self._reloader,
                certificate,
            ).register()
            self._health = Health(loop, cluster.awaits_members if cluster else bool)
            ScrapeServer(settings.metrics, Page(reports.public, settings.metrics), self._health)

    def _members(self) -> tuple[Relays | None, LateEvictions | None, Drain | None]:
        """Build what has other members answer calls of clients of this node, and what hands extents on to them."""
        settings, cluster = self._settings, self._cluster
        if settings.cluster is None or cluster is None:
            return None, None, None
        relays = Relays(settings.cluster, settings.tls, lambda: cluster.report)
        late = LateEvictions(f"{self._state_dir}/late-evictions.json", relays)
        self._ending.callback(late.close)
        late.start()
        cluster.take = TakenExtents(self._runner, self._loop, self._datasets, self._claims).take
        drain = Drain(self._loop, self._runner, self._datasets, cluster, self._weight_bytes)
        self.stop = partial(drain.stop, settings.cluster.drain_on_stop_s)
        return relays, late, drain

    def run(self) -> None:
        """Serve until the loop is stopped."""
        self._loop.run(self._runner.next_deadline, self._runner.tick, time.monotonic)

    @property
    def hangs(self) -> bool:
        """After the end: this process cannot end before a disk answers."""
        return self._threads.hangs

    def leave(self) -> None:
        """Begin no more fills, since another daemon replaces this one, and end the loop when those under way have ended.
        Readers are served meanwhile from what is resident. Runs on the loop's thread."""
        log.info("another daemon replaces this one")
        if self._health is not None:
            self._health.leave()
        self._fills.pause()
        threading.Thread(target=self._end_fills, name="departure", daemon=True).start()

    def _end_fills(self) -> None:
        deadline = time.monotonic() + DRAIN_S
        while self._loop.call(lambda: self._fills.under_way or self._plans.under_way):
            if time.monotonic() >= deadline:
                break
            time.sleep(POLL_S)
        self._loop.stop()

    def _lane(self, name: str) -> Lane:
        return Lane(name, self._loop.post)
