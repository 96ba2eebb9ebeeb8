"""The composition root: builds the daemon from its settings, runs it, takes it down."""

from __future__ import annotations

import errno
import fcntl
import gc
import logging
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path

from cachesvc.config import (
    CONTROL_SOCKET,
    GRANTS_SOCKET,
    NAMED_TWICE,
    STATE_BYTES,
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
from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, OutOfSpace
from cachesvc.core.model import RAM, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.tiering.policy import NodeSettings, TierSpec
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.quotas import Quotas
from cachesvc.daemon.access.tenants import Tenants
from cachesvc.daemon.access.tls import read_tls
from cachesvc.daemon.control.connection_quota import Crowds
from cachesvc.daemon.control.pins import Pins
from cachesvc.daemon.control.server import NO_THREAD, control_path, control_server
from cachesvc.daemon.control.service import Service
from cachesvc.daemon.datasets import Datasets, in_use, is_claimed
from cachesvc.daemon.disks.budgets import Budgets, checked_budget
from cachesvc.daemon.disks.opening import SILENT_S, STANDSTILL_SILENT_S, Opening, awaited
from cachesvc.daemon.disks.renewal import Disk
from cachesvc.daemon.fills.pool import Fillers
from cachesvc.daemon.grants.deferred_close import Disposal
from cachesvc.daemon.grants.listening import check_addresses, check_free, identity, remove
from cachesvc.daemon.grants.server import GrantsServer
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.metrics.http import Scrapes
from cachesvc.daemon.metrics.metrics import Metrics
from cachesvc.daemon.peers.sharing import Sharing
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.daemon.processes.threads import Threads
from cachesvc.daemon.runner import Runner
from cachesvc.daemon.takeover.adoption import END_S, Adopted, Predecessor, fill_ram, meet, restore
from cachesvc.daemon.takeover.takeover import Takeover
from cachesvc.daemon.takeover.wire import SOCKET as TAKEOVER_SOCKET
from cachesvc.sources.uri import Allowlist
from cachesvc.system.footprint import FILLS, largest_ram_bytes
from cachesvc.system.memory import allowed_bytes
from cachesvc.tiers.ram import RamTier

log = logging.getLogger(__name__)
GC_THRESHOLDS = (1000, 2, 5000)
"""A full collection walks every extent's record: 30 ms for 20,000 extents, in the middle of a grant. What the
core drops is no cycle, so one in millions of allocations is enough."""
STOP_GRACE_S = 2.0
END_POLL_S = 0.1
SWITCH_INTERVAL_S = 0.0002
"""Python's own 5 ms is how long a gRPC thread may keep the event loop, and so a grant, waiting."""


def serve(settings: Settings) -> int:
    """Run the daemon until SIGTERM or SIGINT; returns the exit code. Raises CacheError when it cannot
    start: sockets in use, budgets that make no sense, a cache directory that cannot be used."""
    validate(settings)
    check_socket_dir(settings.socket_dir)
    allowed_memory = allowed_bytes()
    check_ram(settings.ram_bytes, allowed_memory)
    if settings.tls is not None:
        read_tls(settings.tls)
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
    # Schedulers warn each process of a job by these; fillers inherit it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    loop = Loop()
    before = meet(settings.socket_dir, settings.state_dir) if settings.takeover else None
    if before is None:
        _end_when_told(loop)
    with (
        _threads_start(),
        _only_one(settings.socket_dir, before, END_S if settings.takeover else 0.0) as lock,
        _filling(settings, allowed.roots, loop) as fillers,
        ExitStack() as ending,
    ):
        runner = _built(ending, settings, allowed, lookups, fillers, loop, lock, before, open_files)
        if open_files < wanted:
            few = {"limit": open_files, "advised": wanted, "extents_in_ram": most_in_ram(open_files)}
            log.warning("few open files are allowed", extra={**few, "readers": most_readers(open_files)})
        log.info(
            "serving", extra={"socket": settings.socket_dir, "allow": settings.allow, "pid": os.getpid()}
        )
        loop.run(runner.next_deadline, runner.tick, time.monotonic)
        log.info("stopping")
    if runner.hangs or runner.disposal.count():
        log.warning(
            "this process ends when the disks that it waits for answer, or what clients sent; nothing else waits for that"
        )
        _leave_all(fillers, runner.disposal)
    return 0


@contextmanager
def _threads_start() -> Iterator[None]:
    """Raises CacheError where no thread can be started."""
    try:
        yield
    except RuntimeError as error:
        if "start new thread" not in str(error):
            raise
        raise CacheError(NO_THREAD) from error


def _end_when_told(loop: Loop) -> None:
    """From here on a signal ends the daemon in order. Before it has taken over from another, one ends the process at
    once, and the other goes on."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # nohup's
            signal.signal(number, lambda *_: loop.stop())
    signal.set_wakeup_fd(loop.wake_fd, warn_on_full_buffer=False)


def raise_open_files(wanted: int) -> int:
    """Every grant and connection is a descriptor: take what the hard limit gives; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    if soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return max(soft, wanted)


@contextmanager
def _only_one(directory: str, before: Predecessor | None, wait_s: float) -> Iterator[int]:
    """Hold the socket directory's lock: the socket file alone cannot tell a live daemon from a dead one
    without a race. A daemon that is taken over from shares its own; one that is ending, and cannot be met any more,
    has `wait_s` for it. Raises InvalidInput where something else is in a socket's place."""
    lock = _locked(directory, time.monotonic() + wait_s) if before is None else before.lock
    try:
        if before is None:
            for name in (CONTROL_SOCKET, GRANTS_SOCKET, TAKEOVER_SOCKET):
                check_free(f"{directory}/{name}")
        else:
            check_free(f"{directory}/{CONTROL_SOCKET}", before.pid)  # it hands the others over
        yield lock
    finally:
        os.close(lock)


def _locked(directory: str, deadline: float) -> int:
    try:
        Path(directory).mkdir(parents=True, exist_ok=True)
        lock = os.open(f"{directory}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise NotAllowed(
            f"{directory} cannot hold the daemon's sockets ({error.strerror}); give --socket a directory of yours"
        ) from None
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() >= deadline:
                os.close(lock)
                raise InvalidInput(
                    f"a daemon already serves {directory}; stop it, give --takeover, or give --socket another directory"
                ) from None
        if not told:
            log.info("a daemon that is ending is waited for", extra={"socket": directory})
        told = True
        time.sleep(END_POLL_S)


def _make_state_dir(directory: str) -> None:
    """Raises NotAllowed or OutOfSpace where catalogs and metadata cannot be kept."""
    try:
        for private in (f"{directory}/catalogs", f"{directory}/metadata"):  # they name every tenant's data
            Path(private).mkdir(parents=True, exist_ok=True)
            os.chmod(private, 0o700)
        with tempfile.TemporaryFile(dir=directory) as probe:
            os.posix_fallocate(probe.fileno(), 0, STATE_BYTES)
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        where = error.filename if isinstance(error, FileExistsError) else directory
        mend = f"free {STATE_BYTES >> 20} MiB there" if full else "give it to the daemon's user, writable"
        raise (OutOfSpace if full else NotAllowed)(
            f"{where} cannot hold the daemon's state ({error.strerror}); {mend}, or give --state-dir another"
            " directory"
        ) from None


@contextmanager
def _filling(settings: Settings, roots: tuple[str, ...], loop: Loop) -> Iterator[Fillers]:
    """Fillers, which end with the daemon, and with one that cannot start."""
    _make_state_dir(settings.state_dir)
    fillers = Fillers(settings, roots, loop.watch, loop.unwatch)
    fillers.start()  # before any thread
    try:
        yield fillers
    finally:
        fillers.stop()


def _built(
    ending: ExitStack,
    settings: Settings,
    allowed: Allowlist,
    lookups: Lookups,
    fillers: Fillers,
    loop: Loop,
    lock: int,
    before: Predecessor | None,
    open_files: int,
) -> Runner:
    """Build everything and bind the sockets. What has to be undone at the end, also of a start that failed, is
    `ending`'s."""
    quotas = Quotas(settings.quota, lambda prefix: lookups.place(prefix, "--quota"))
    check_addresses(settings, before.addresses if before else ())
    loader = Threads(2, "catalogs")
    control_file: tuple[int, int] | None = None
    ending.callback(lambda: remove(control_path(settings), control_file))
    tenants = Tenants(allowed, settings.rules)
    datasets = Datasets(f"{settings.state_dir}/catalogs", allowed, tenants, lookups, loader, before is None)
    ending.callback(datasets.close)
    ending.callback(loader.shutdown, wait=False)
    adopted = _adopted(before, datasets)
    ram = RamTier(RAM, most_in_ram(open_files))
    openings = _openings(settings, adopted, loop)
    in_ram = fill_ram(ram, settings.ram_bytes, adopted)  # while they go on
    lost = awaited(openings, SILENT_S if before is None else STANDSTILL_SILENT_S)
    specs, recovered = _taken(settings, openings, lost, in_ram)
    if before is not None:
        _end_when_told(loop)
        before.adopted()
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
    runner = Runner(node, ram, openings, datasets, fillers, loop, time.monotonic, budgets)
    ending.callback(runner.close)
    ending.callback(fillers.stop)
    runner.quotas = quotas
    runner.count_from(max(1, adopted.state.next_id))
    pins = Pins(f"{settings.state_dir}/pins.json", runner)
    _recover(recovered, runner, pins)
    for name, why in lost.items():
        runner.watch.not_opened(name, why)
    grants = runner.granting.server = _grants(settings, runner, open_files, adopted)
    ending.callback(grants.close)
    pins.restore()
    restore(adopted, runner)
    takeover = Takeover(settings, lock, ram, runner, partial(_leave_all, fillers, runner.disposal))
    ending.callback(takeover.close)
    service = Service(runner, pins, settings, tenants, lookups, time.monotonic())
    sharing = Sharing(settings, runner)
    ending.callback(sharing.close)
    if settings.share:
        sharing.start()
    callers = most_callers(open_files)
    server = control_server(settings, service, grants.caller, callers)
    control_file = identity(control_path(settings))
    ending.callback(server.stop, STOP_GRACE_S)
    crowds = Crowds(control_path(settings), callers)
    ending.callback(crowds.close)
    if settings.metrics:
        Metrics(runner, sharing).register()
        Scrapes(settings.metrics)
    return runner


def _adopted(before: Predecessor | None, datasets: Datasets) -> Adopted:
    """What comes from the daemon that served before us; readers wait from here until the loop runs."""
    if before is None:
        return Adopted()
    before.prepare(datasets)
    return before.hand_over()


def _recover(recovered: list[events.Recovered], runner: Runner, pins: Pins) -> None:
    """Tell the core what its tiers hold. Where that exceeds a budget, what is pinned is to stay."""
    for event in recovered:
        budget_bytes = runner.node.policy.tiers[event.tier].budget_bytes
        runner.recovered(event if sum(event.extents.values()) <= budget_bytes else pins.spared(event))


def _grants(settings: Settings, runner: Runner, open_files: int, adopted: Adopted) -> GrantsServer:
    return GrantsServer(
        f"{settings.socket_dir}/{GRANTS_SOCKET}",
        settings.socket_mode,
        runner,
        runner.plans,
        runner.disposal,
        runner.loop.watch,
        runner.loop.unwatch,
        runner.next_id,
        most_readers(open_files),
        open_files,
        adopted.listener,
    )


def _leave_all(fillers: Fillers, disposal: Disposal) -> None:
    """End this process at once: gRPC would remove the socket file, and tiers and connections are another's."""
    fillers.stop(wait=False)
    logging.shutdown()
    _let_go(disposal.left())
    os._exit(0)


def _let_go(strangers: Container[int]) -> None:
    """Close every socket and give back the RAM tier: a process that hangs in a disk ends when that answers, and would
    keep ports and memory until then. What strangers sent may hang as it is closed, and goes with the process."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) in strangers:
            continue
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "/memfd:cachesvc:")):
                os.close(int(name))


def _openings(settings: Settings, adopted: Adopted, loop: Loop) -> list[Opening]:
    """Begin to open all cache directories, but those that are handed over as lost."""
    openings = []
    for number, spec in enumerate(settings.nvme):
        name, path = TierName(f"nvme{number}"), Path(spec.path).absolute()
        disk = Disk(name, path, adopted.locks_of(str(path)), adopted.mounted(str(path)))
        opening = Opening(disk, Lane(f"probe-{name}", loop.post, time.monotonic))
        openings.append(opening)
        opening.skip() if adopted.lost(str(path)) else opening.begin()
    for fd in adopted.locks:
        os.close(fd)
    return openings


def _taken(
    settings: Settings, openings: Sequence[Opening], lost: Mapping[TierName, str], in_ram: events.Recovered
) -> tuple[list[TierSpec], list[events.Recovered]]:
    """The tiers, and what those that are open hold. Raises OutOfSpace where a budget makes no sense."""
    specs = [TierSpec(RAM, settings.ram_bytes)] if settings.ram_bytes else []
    recovered = [in_ram] if settings.ram_bytes else []
    for opening, spec in zip(openings, settings.nvme, strict=True):
        disk = opening.disk
        found = disk.take() if disk.name not in lost else None
        if found is None:
            specs.append(TierSpec(disk.name, 0))  # nobody knows its room yet
            continue
        budget = checked_budget(spec, found.room, sum(found.extents.values()), settings.extent_bytes)
        log.info(
            "cache directory", extra={"dir": spec.path, "extents": len(found.extents), "budget_bytes": budget}
        )
        specs.append(TierSpec(disk.name, budget))
        recovered.append(events.Recovered(disk.name, found.extents))
    _check_each_once([opening.disk for opening in openings])
    return specs, recovered


def _check_each_once(disks: Sequence[Disk]) -> None:
    """Raises InvalidInput where two of them are one directory: an old daemon's lock of it is shared by both. Also where one
    failed: each removes what the other is just writing."""
    seen: set[tuple[int, int]] = set()
    for disk in disks:
        if disk.place is None:
            continue
        if disk.place in seen:
            raise InvalidInput(NAMED_TWICE.format(disk.path))
        seen.add(disk.place)
