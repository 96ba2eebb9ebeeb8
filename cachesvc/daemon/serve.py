"""The composition root: builds the daemon from its settings, runs it, takes it down."""

from __future__ import annotations

import gc
import logging
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from cachesvc.cluster.membership import Registration
from cachesvc.cluster.open import open_membership
from cachesvc.config import (
    GRANTS_SOCKET,
    Settings,
    check_open_files,
    check_ram,
    check_socket_dir,
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
    SILENT_S,
    STANDSTILL_SILENT_S,
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
from cachesvc.daemon.peers.cluster_link import ClusterLink
from cachesvc.daemon.ports import FREE_S, TAKEOVER_S, wait_for_addresses
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.daemon.processes.threads import ThreadPool
from cachesvc.daemon.reader_events import ReaderEvents
from cachesvc.daemon.runner import Runner
from cachesvc.daemon.socket_lock import only_daemon
from cachesvc.daemon.takeover.new_daemon import END_S, Handover, OldDaemon, fill_ram, find_old_daemon, restore
from cachesvc.daemon.takeover.old_daemon import TakeoverListener
from cachesvc.sources.uri import Allowlist
from cachesvc.system.footprint import FILLS, largest_ram_bytes
from cachesvc.system.memory import allowed_bytes, check_memfd
from cachesvc.tiers.ram import RamTier

log = logging.getLogger(__name__)
GC_THRESHOLDS = (1000, 2, 5000)
"""A full garbage collection walks every extent's record, 30 ms for 20,000 extents, and delays grants. The core makes no
reference cycles, so one in millions of allocations is enough."""
SWITCH_INTERVAL_S = 0.0002
"""The longest that a gRPC thread may keep the event loop, and so a grant, waiting; Python's default is 5 ms."""


def serve(settings: Settings) -> int:
    """Run the daemon until SIGTERM or SIGINT; return the exit code.

    Raises CacheError where it cannot start: invalid settings, sockets in use, budgets that hold no extent, or an unusable
    cache directory.
    """
    validate(settings)
    check_memfd()
    check_socket_dir(settings.socket_dir)
    allowed_memory = allowed_bytes()
    check_ram(settings.ram_bytes, allowed_memory)
    if settings.tls is not None:
        read_tls(settings.tls)
    if (member := settings.cluster) is not None:
        me = Registration(member.node_name, member.advertise, member.zone)
        open_membership(
            member.members, me, settings.tls
        )  # the peer agent opens it; an error ends the start here
    configure_logging(settings.log_format)
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
    # Schedulers send these as warnings to each process of a job; fillers inherit the setting.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    loop = Loop()
    old = find_old_daemon(settings.socket_dir, settings.state_dir) if settings.takeover else None
    with (
        _translate_thread_errors(),
        only_daemon(settings.socket_dir, old, END_S if settings.takeover else 0.0) as lock,
    ):
        # Until signals are handled they end the process at once.
        wait_for_addresses(settings, old.addresses if old else (), TAKEOVER_S if old else FREE_S)
        if old is None:
            _stop_on_signals(loop)
        with _running_fillers(settings, allowed.roots, loop) as fillers, ExitStack() as ending:
            runner = _build(ending, settings, allowed, lookups, fillers, loop, lock, old, open_files)
            if open_files < wanted:
                limits = {"limit": open_files, "advised": wanted, "extents_in_ram": most_in_ram(open_files)}
                log.warning(
                    "few open files are allowed", extra={**limits, "readers": most_readers(open_files)}
                )
            log.info(
                "serving",
                extra={"socket": settings.socket_dir, "allow": settings.allow, "pid": os.getpid()},
            )
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


def _stop_on_signals(loop: Loop) -> None:
    """End the daemon in order on signals. During a takeover this is called late: until then a signal kills the new daemon,
    and the old one goes on."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(number, lambda *_: loop.stop())
    signal.set_wakeup_fd(loop.wake_fd, warn_on_full_buffer=False)


def raise_open_files(wanted: int) -> int:
    """Raise the limit of open files to `wanted`, as far as the hard limit allows; return the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


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
    lock: int,
    old: OldDaemon | None,
    open_files: int,
) -> Runner:
    """Build all parts and bind the sockets. `ending` collects the steps that undo it at the end or after a failed start."""
    quotas = Quotas(settings.quota, lambda prefix: lookups.resolve(prefix, "--quota"))
    loader = ThreadPool(2, "catalogs")
    tenants = Tenants(allowed, settings.rules)
    datasets = Datasets(f"{settings.state_dir}/catalogs", allowed, tenants, lookups, loader, old is None)
    ending.callback(datasets.close)
    ending.callback(loader.shutdown, wait=False)
    adopted = _hand_over(old, datasets)
    ram = RamTier(RAM, most_in_ram(open_files))
    openings = _start_openings(settings, adopted, loop)
    in_ram = fill_ram(ram, settings.ram_bytes, adopted)  # while they go on
    lost = wait_until_open(openings, SILENT_S if old is None else STANDSTILL_SILENT_S)
    specs, recovered = tiers_at_start(settings, openings, lost, in_ram)
    if old is not None:
        _stop_on_signals(loop)
        old.adopted()
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
    runner.count_from(max(1, adopted.state.next_id))
    pins = Pins(f"{settings.state_dir}/pins.json", runner)
    _report_recovered(recovered, runner, pins)
    for name, why in lost.items():
        runner.watch.not_opened(name, why)
    grants = runner.granting.server = _grants_server(settings, runner, open_files, adopted)
    ending.callback(grants.close)
    pins.restore()
    restore(adopted, runner)
    takeover = TakeoverListener(settings, lock, ram, runner, partial(_exit_at_once, fillers))
    ending.callback(takeover.close)
    service = Service(runner, pins, settings, tenants, lookups, time.monotonic())
    cluster = None
    if settings.cluster is not None:
        cluster = ClusterLink(settings, _weight_bytes(settings, node), runner)
        ending.callback(cluster.close)
        runner.cluster = cluster
        cluster.start()
    control = ControlServer(settings, service, grants.caller, most_callers(open_files))
    ending.callback(control.close)
    directories = OwnDirectories(settings, lock, loop, (grants, takeover), control)
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


def _hand_over(old: OldDaemon | None, datasets: Datasets) -> Handover:
    """Take over the state of the old daemon, if there is one; readers wait from here until the loop runs."""
    if old is None:
        return Handover()
    old.prepare(datasets)
    return old.hand_over()


def _report_recovered(recovered: list[events.Recovered], runner: Runner, pins: Pins) -> None:
    """Tell the core what its tiers hold. Pinned extents come last, so they stay, where the extents exceed a budget."""
    for event in recovered:
        budget_bytes = runner.node.policy.tiers[event.tier].budget_bytes
        runner.recovered(event if sum(event.extents.values()) <= budget_bytes else pins.pinned_last(event))


def _grants_server(settings: Settings, runner: Runner, open_files: int, adopted: Handover) -> GrantsServer:
    return GrantsServer(
        f"{settings.socket_dir}/{GRANTS_SOCKET}",
        settings.socket_mode,
        ReaderEvents(runner),
        runner.plans,
        runner.loop.watch,
        runner.loop.unwatch,
        runner.next_id,
        most_readers(open_files),
        adopted.listener,
    )


def _exit_at_once(fillers: FillerPool) -> None:
    """End this process without an orderly close: gRPC would remove a socket file that the new daemon owns."""
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


def _start_openings(settings: Settings, adopted: Handover, loop: Loop) -> list[DirectoryOpening]:
    """Begin to open all cache directories, except those that were handed over as lost."""
    openings = []
    for number, spec in enumerate(settings.nvme):
        name, path = TierName(f"nvme{number}"), Path(spec.path).absolute()
        disk = Disk(name, path, adopted.locks_of(str(path)), adopted.mounted(str(path)), spec.mounted)
        opening = DirectoryOpening(disk, Lane(f"probe-{name}", loop.post, time.monotonic))
        openings.append(opening)
        opening.skip() if adopted.lost(str(path)) else opening.begin()
    for fd in adopted.locks:
        os.close(fd)
    return openings
