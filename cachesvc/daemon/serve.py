"""The composition root: builds the daemon from its settings, runs it, takes it down."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec

from cachesvc.cluster.membership import Registration
from cachesvc.cluster.open import open_membership
from cachesvc.config import (
    GRANTS_SOCKET,
    Settings,
    check_open_files,
    check_ram,
    most_callers,
    most_in_ram,
    most_readers,
    open_files_advised,
    ram_advice,
    validate,
)
from cachesvc.core import events
from cachesvc.core.errors import CacheError
from cachesvc.core.model import RAM, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.access.tenants import Tenants
from cachesvc.daemon.access.tls import read_tls
from cachesvc.daemon.control.pins import Pins
from cachesvc.daemon.control.server import NO_THREAD, ControlServer
from cachesvc.daemon.control.service import Service
from cachesvc.daemon.datasets import Datasets, in_use, is_claimed
from cachesvc.daemon.disks.budgets import Budgets
from cachesvc.daemon.disks.opening import (
    DirectoryOpening,
    tiers_at_start,
    wait_until_open,
)
from cachesvc.daemon.disks.renewal import Disk
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.own_directories import OwnDirectories, make_state_dir
from cachesvc.daemon.parent.adoption import adopt_copies
from cachesvc.daemon.parent.departure import depart
from cachesvc.daemon.parent.messages import LEAVE, Given
from cachesvc.daemon.parent.parent_link import ParentLink, die_with_parent
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.daemon.ports import FREE_S, REPLACES_S, wait_for_addresses
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.daemon.processes.threads import ThreadPool
from cachesvc.daemon.reader_events import ReaderEvents
from cachesvc.daemon.runner import Runner
from cachesvc.sources.uri import Allowlist
from cachesvc.system.footprint import FILLS, largest_ram_bytes
from cachesvc.system.memory import allowed_bytes, check_memfd
from cachesvc.system.open_files import raise_open_files
from cachesvc.tiers.ram import RamTier

log = logging.getLogger(__name__)
GC_THRESHOLDS = (1000, 2, 5000)
"""A full garbage collection walks every extent's record, 30 ms for 20,000 extents, and delays grants. The core makes no
reference cycles, so one in millions of allocations is enough."""
SWITCH_INTERVAL_S = 0.0002
"""The longest that a gRPC thread may keep the event loop, and so a grant, waiting; Python's default is 5 ms."""


def serve(settings: Settings, parent: ParentLink, replaces: bool) -> int:
    """Run the daemon until SIGTERM; return the exit code. `replaces`: readers wait until it serves.

    Raises CacheError where it cannot start: invalid settings, addresses in use, budgets that hold no extent, or an unusable
    cache directory.
    """
    validate(settings)
    check_memfd()
    allowed_memory = allowed_bytes()
    check_ram(settings.ram_bytes, allowed_memory)
    if settings.tls is not None:
        read_tls(settings.tls)
    if (member := settings.cluster) is not None:
        me = Registration(member.node_name, member.advertise, member.zone)
        open_membership(
            member.members, me, settings.tls
        )  # the peer agent opens it; an error ends the start here
    if advice := ram_advice(settings, allowed_memory):
        log.warning(advice)
    lookups = Lookups()
    allowed = lookups.allowlist(settings.allow, exact=bool(settings.rules))
    wanted = open_files_advised(settings.ram_bytes, settings.extent_bytes)
    open_files = raise_open_files(wanted)
    check_open_files(open_files)
    gc.set_threshold(*GC_THRESHOLDS)
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    # Schedulers send the first two as warnings to each process of a job; fillers inherit the setting. The parent handles
    # the others.
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    loop = Loop()
    with (
        _translate_thread_errors(),
        _running_fillers(settings, allowed.roots, loop) as fillers,
        ExitStack() as ending,
    ):
        runner = _build(ending, settings, allowed, lookups, fillers, loop, parent, replaces, open_files)
        signal.signal(signal.SIGTERM, lambda *_: loop.stop())
        signal.signal(LEAVE, lambda *_: loop.post(lambda: depart(runner)))
        signal.set_wakeup_fd(loop.wake_fd, warn_on_full_buffer=False)
        if open_files < wanted:
            limits = {"limit": open_files, "advised": wanted, "extents_in_ram": most_in_ram(open_files)}
            log.warning("few open files are allowed", extra={**limits, "readers": most_readers(open_files)})
        log.info(
            "serving", extra={"socket": settings.socket_dir, "allow": settings.allow, "pid": os.getpid()}
        )
        parent.serves()
        loop.run(runner.next_deadline, runner.tick, time.monotonic)
        log.info("stopping")
    if runner.hangs:
        log.warning(
            "this process ends when the disks that it waits for answer; it releases its sockets and memory now"
        )
        _exit_at_once(fillers)
    return 0


@contextmanager
def _translate_thread_errors() -> Iterator[None]:
    """Raise CacheError where the system refuses to start a thread."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise CacheError(NO_THREAD) from error


@contextmanager
def _running_fillers(settings: Settings, roots: tuple[str, ...], loop: Loop) -> Iterator[FillerPool]:
    """Start the fillers; they end with the daemon, also where its start fails."""
    make_state_dir(settings.state_dir)
    fillers = FillerPool(settings, roots, loop.watch, loop.unwatch)
    fillers.start()  # before the daemon starts a thread
    try:
        yield fillers
    finally:
        fillers.stop()


def _build(
    ending: ExitStack,
    settings: Settings,
    allowed: Allowlist,
    lookups: Lookups,
    fillers: FillerPool,
    loop: Loop,
    parent: ParentLink,
    replaces: bool,
    open_files: int,
) -> Runner:
    """Build all parts and bind the sockets. `ending` collects the steps that undo it at the end or after a failed start."""
    quotas = Quotas(settings.quota, lambda prefix: lookups.resolve(prefix, "--quota"))
    held = list(parent.copies())  # from here on no other daemon runs
    wait_for_addresses(settings, REPLACES_S if replaces else FREE_S)
    loader = ThreadPool(2, "catalogs")
    tenants = Tenants(allowed, settings.rules)
    datasets = Datasets(f"{settings.state_dir}/catalogs", allowed, tenants, lookups, loader)
    ending.callback(datasets.close)
    ending.callback(loader.shutdown, wait=False)
    ram = RamTier(RAM, most_in_ram(open_files), parent)
    openings = _start_openings(settings, loop)
    in_ram = adopt_copies(ram, settings.ram_bytes, held)  # while they go on
    lost = wait_until_open(openings)
    specs, recovered = tiers_at_start(settings, openings, lost, in_ram)
    fills = settings.fillers * FILLS
    core = NodeSettings(
        max_fills=fills,
        fill_bytes=(fills - 1) * settings.extent_bytes,
        scrub_bytes_per_s=settings.scrub_rate,
        unplanned_share=settings.unplanned_share,
    )
    node = Node(specs, core)
    datasets.claimed, datasets.used = partial(is_claimed, node), partial(in_use, node)
    nvme = {TierName(f"nvme{number}"): spec for number, spec in enumerate(settings.nvme)}
    together_bytes = largest_ram_bytes(allowed_bytes(), settings.own_bytes) + settings.work_bytes
    budgets = Budgets(nvme, settings.extent_bytes, settings.work_bytes, together_bytes)
    runner = Runner(node, ram, openings, datasets, fillers, loop, time.monotonic, budgets, quotas)
    ending.callback(runner.close)
    ending.callback(fillers.stop)
    pins = Pins(f"{settings.state_dir}/pins.json", runner)
    _report_recovered(recovered, runner, pins)
    for name, why in lost.items():
        runner.watch.not_opened(name, why)
    grants = runner.granting.server = _grants_server(settings, runner, open_files)
    ending.callback(grants.close)
    pins.restore()
    service = Service(runner, pins, settings, tenants, lookups, time.monotonic())
    cluster = None
    if settings.cluster is not None:
        cluster = ClusterLink(settings, _weight_bytes(settings, node), runner)
        ending.callback(cluster.close)
        runner.cluster = cluster
        cluster.start()
    control = ControlServer(settings, service, grants.caller, most_callers(open_files))
    ending.callback(control.close)
    directories = OwnDirectories(settings, loop, (grants,), control)
    ending.callback(directories.close)
    if settings.metrics:  # Prometheus's library takes 50 ms of CPU
        from cachesvc.daemon.metrics.collector import MetricsCollector
        from cachesvc.daemon.metrics.scrape_server import ScrapeServer

        MetricsCollector(runner).register()
        ScrapeServer(settings.metrics)
    return runner


def _weight_bytes(settings: Settings, node: Node) -> int:
    """Return the room of all tiers, which decides this node's share of a cluster's extents. As configured where that is
    in bytes, since shares move when it changes."""
    weight = settings.ram_bytes
    for number, spec in enumerate(settings.nvme):
        weight += spec.size_bytes or node.policy.tiers[TierName(f"nvme{number}")].given_bytes
    return weight


def _report_recovered(recovered: list[events.Recovered], runner: Runner, pins: Pins) -> None:
    """Tell the core what its tiers hold. Pinned extents come last, so they stay, where the extents exceed a budget."""
    for event in recovered:
        budget_bytes = runner.node.policy.tiers[event.tier].budget_bytes
        runner.recovered(event if sum(event.extents.values()) <= budget_bytes else pins.pinned_last(event))


def _grants_server(settings: Settings, runner: Runner, open_files: int) -> GrantsServer:
    return GrantsServer(
        f"{settings.socket_dir}/{GRANTS_SOCKET}",
        settings.socket_mode,
        ReaderEvents(runner),
        runner.plans,
        runner.loop.watch,
        runner.loop.unwatch,
        runner.next_id,
        most_readers(open_files),
    )


def _exit_at_once(fillers: FillerPool) -> None:
    """End this process without an orderly close, which would wait for the disks."""
    fillers.stop(wait=False)
    logging.shutdown()
    _release_resources()
    os._exit(0)


def _release_resources() -> None:
    """Close all sockets and the RAM tier's memory. A process that hangs in a disk ends only when the disk answers, and
    would keep ports and memory until then."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "/memfd:cachesvc:")):
                os.close(int(name))


def _start_openings(settings: Settings, loop: Loop) -> list[DirectoryOpening]:
    """Begin to open all cache directories."""
    openings = []
    for number, spec in enumerate(settings.nvme):
        name = TierName(f"nvme{number}")
        disk = Disk(name, Path(spec.path).absolute(), spec.mounted)
        openings.append(DirectoryOpening(disk, Lane(f"probe-{name}", loop.post, time.monotonic)))
        openings[-1].begin()
    return openings


def main() -> None:
    """Run the daemon as the child of its parent."""
    given = msgspec.json.decode(os.environ.pop("CACHESVC_GIVEN"), type=Given)
    sys.exit(run_daemon(given, socket.socket(fileno=int(sys.argv[1]))))


def run_daemon(given: Given, channel: socket.socket) -> int:
    """Run the daemon with the channel to its parent; return the exit code."""
    die_with_parent(given.parent)
    signal.pthread_sigmask(
        signal.SIG_UNBLOCK, {signal.SIGTERM}
    )  # it was blocked while this process was started
    settings = msgspec.json.decode(given.settings, type=Settings)
    configure_logging(settings.log_format)
    parent = ParentLink(channel)
    try:
        return serve(settings, parent, given.replaces)
    except CacheError as error:
        parent.failed(error)
        return error.code


if __name__ == "__main__":
    main()
