"""The daemon's process: has the daemon built from its settings, runs it, takes it down."""

from __future__ import annotations

import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

import cachesvc
from cachesvc.cluster.open import open_membership
from cachesvc.cluster.polled import Registration
from cachesvc.config import (
    Settings,
    check_open_files,
    check_ram,
    most_in_ram,
    most_readers,
    open_files_advised,
    ram_advice,
    validate,
)
from cachesvc.core.errors import CacheError
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.tls import read_tls
from cachesvc.daemon.composition import Composition
from cachesvc.daemon.control.server import NO_THREAD
from cachesvc.daemon.events.event import Event, record
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.loop.loop import Loop
from cachesvc.daemon.own_directories import make_state_dir
from cachesvc.daemon.parent.messages import LEAVE, Given
from cachesvc.daemon.parent.parent_link import ParentLink, die_with_parent
from cachesvc.daemon.ports import FREE_S, REPLACES_S, wait_for_addresses
from cachesvc.daemon.processes.logs import configure_logging
from cachesvc.system.memory import allowed_bytes, check_memfd, raise_open_files

log = logging.getLogger(__name__)
FEW_READERS = 256
"""A limit of open files that allows more readers, and all of the RAM tier, is not worth a warning."""
GC_THRESHOLDS = (1000, 2, 5000)
"""A full garbage collection walks every extent's record, 30 ms for 20,000 extents, and delays grants. The core makes no
reference cycles, so one in millions of allocations is enough."""
SWITCH_INTERVAL_S = 0.0002
"""The longest that a gRPC thread may keep the event loop, and so a grant, waiting; Python's default is 5 ms."""


def serve(settings: Settings, parent: ParentLink, given: Given) -> int:
    """Run the daemon until SIGTERM; return the exit code.

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
    os.environ.setdefault(
        "GRPC_VERBOSITY", "NONE"
    )  # its own lines have no level, and errors come back as statuses
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
        daemon = Composition(settings, loop, fillers, open_files, ending)
        daemon.access(allowed, lookups)
        held = list(parent.copies())  # from here on no other daemon runs
        daemon.events()
        _record_start(given)
        wait_for_addresses(settings, REPLACES_S if given.replaces else FREE_S)
        daemon.datasets()
        daemon.tiers(parent, held)
        daemon.fills()
        daemon.readers()
        reloader = daemon.reload(stale=bool(given.crash))
        # Before a client sees that this process serves. It was blocked while the process was started.
        signal.signal(signal.SIGHUP, lambda *_: reloader.ask())
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGHUP})
        daemon.control()
        signal.signal(signal.SIGTERM, lambda *_: loop.post(daemon.stop))
        signal.signal(LEAVE, lambda *_: loop.post(daemon.leave))
        signal.set_wakeup_fd(loop.wake_fd, warn_on_full_buffer=False)
        in_ram, readers = settings.ram_bytes // settings.extent_bytes, most_readers(open_files)
        if open_files < wanted and (in_ram > most_in_ram(open_files) or readers < FEW_READERS):
            limits = {"limit": open_files, "advised": wanted, "extents_in_ram": most_in_ram(open_files)}
            log.warning("few open files are allowed", extra={**limits, "readers": readers})
        record(Event("started", pid=os.getpid(), why=f"at {settings.socket_dir}: {_allowed(settings)}"))
        parent.serves()
        reloader.start()
        daemon.run()
        record(Event("stopped", pid=os.getpid()))
    if daemon.hangs:
        log.warning(
            "this process ends when the disks that it waits for answer; it releases its sockets and memory now"
        )
        _exit_at_once(fillers, settings.socket_dir)
    return 0


def _allowed(settings: Settings) -> str:
    """Say what is served, without the prefixes that only some users may know of: every user sees the event."""
    ruled = {rule.prefix for rule in settings.rules}
    open_to_all = [each for each in settings.allow if each not in ruled]
    closed = [f"{len(ruled)} prefixes with access rules"] if ruled else []
    return ", ".join(open_to_all + closed) or "all that this user may read"


def _record_start(given: Given) -> None:
    """Record why this daemon is started, where it is not the service's first."""
    if given.crash:
        record(Event("crashed", why=given.crash))
    elif given.replaces:
        record(Event("upgraded", pid=os.getpid(), why=f"release {cachesvc.__version__}"))


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


def _exit_at_once(fillers: FillerPool, socket_dir: str) -> None:
    """End this process without an orderly close, which would wait for the disks."""
    fillers.stop(wait=False)
    logging.shutdown()
    _release_resources(f"{os.path.realpath(socket_dir)}/lock")
    os._exit(0)


def _release_resources(lock: str) -> None:
    """Close all sockets, the RAM tier's memory and the service's lock. A process that hangs in a disk ends only when the
    disk answers, and would keep them until then."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(("socket:", "/memfd:cachesvc:", lock)):
                os.close(int(name))


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
    configure_logging(settings.log_format, settings.log)
    parent = ParentLink(channel)
    try:
        return serve(settings, parent, given)
    except CacheError as error:
        parent.failed(error)
        return error.code


if __name__ == "__main__":
    main()
