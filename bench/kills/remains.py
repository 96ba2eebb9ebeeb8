"""What the dead leave behind, which must be nothing: processes, files, sockets, leases, memory."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError
from testbed.node import Daemon, open_files

TOKEN = "CACHESVC_KILLS"
"""The environment variable that every process of a drill inherits."""
OUTLIVE_S = 15.0
"""A process without the one that it works for ends within this. Most end at once; a filler that is still starting,
at its low priority, does so when it has started."""
LOOK_EVERY_S = 0.2
LEFT_S = 45.0
"""What has not ended by then is left behind, and not late."""
SETTLE_S = 10.0


class Doomed:
    """Processes that lost the one they work for. Those that take long to end are in `late`."""

    def __init__(self) -> None:
        self._dying: list[tuple[psutil.Process, float]] = []
        self._look_at = 0.0
        self.late: list[str] = []

    def add(self, processes: Iterable[psutil.Process]) -> None:
        """They are to end, from now on."""
        deadline = time.monotonic() + OUTLIVE_S
        self._dying += [(process, deadline) for process in processes]

    def poll(self) -> None:
        """Look who has ended."""
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_EVERY_S
        living = [(process, deadline) for process, deadline in self._dying if _lives(process)]
        self._dying = [(process, deadline) for process, deadline in living if now < deadline]
        self.late += [
            f"{_described(process)} outlived its parent" for process, until in living if now >= until
        ]


def _described(process: psutil.Process) -> str:
    try:
        return f"process {process.pid} ({' '.join(process.cmdline())[:80]})"
    except psutil.Error:
        return f"process {process.pid}"


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def processes(token: str) -> tuple[list[str], list[str]]:
    """The processes of a drill that do not end, and those that are late to end, by their environment; but for this
    one, and those that start its trainers."""
    late = _after(OUTLIVE_S, token)
    left = _after(LEFT_S - OUTLIVE_S, token) if late else []
    return left, [each for each in late if each not in left]


def _after(limit_s: float, token: str) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (found := _marked(token)) and time.monotonic() < deadline:
        time.sleep(LOOK_EVERY_S)
    return found


def _marked(token: str) -> list[str]:
    own, found = {os.getpid(), *(child.pid for child in psutil.Process().children())}, []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(TOKEN) == token:
                found.append(_described(process))
        except psutil.Error:  # ended since it was listed, or somebody else's
            continue
    return found


def in_daemon(daemon: Daemon) -> Iterator[str]:
    """Leases, readers and memory that a daemon still counts though nobody reads any more."""
    assert daemon.process is not None
    with Control(daemon.socket_dir) as control:
        deadline = time.monotonic() + SETTLE_S
        while (found := [*_counted(control), *_memory(daemon.process.pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
    yield from found


def _counted(control: Control) -> Iterator[str]:
    try:
        busy = sum(control.evict(row.dataset.id).busy_bytes for row in control.list())
        status = control.status()
    except CacheError as error:
        yield f"no status: {error}"
        return
    if busy:
        yield f"{busy:,} bytes are leased"
    if status.readers or status.fills_running:
        yield f"{status.readers} readers, {status.fills_running} fills"
    for tier in status.tiers:
        if tier.used_bytes or tier.held_bytes:
            yield f"{tier.name}: {tier.used_bytes:,} bytes used, {tier.held_bytes:,} held"


def _memory(pid: int) -> Iterator[str]:
    """Extents in memory that no tier counts."""
    for name in open_files(pid):
        if name.startswith("/memfd:cachesvc:"):
            yield f"the daemon holds {name}"


def files(daemon: Daemon, nvme: Path, temporary: Path, shared_memory: set[str]) -> Iterator[str]:
    """What lies about when all have ended, the daemon included, and all was evicted."""
    for folder, expected in ((Path(daemon.socket_dir), {"lock"}), (nvme / "cachesvc/v1/tmp", set())):
        yield from (f"{folder}/{name}" for name in set(os.listdir(folder)) - expected)
    extents = nvme / "cachesvc/v1/extents"
    yield from (str(path) for path in extents.rglob("*") if path.is_file())
    catalogs = daemon.root / "state/catalogs"
    yield from (str(path) for path in catalogs.iterdir() if path.suffix != ".lmdb")
    yield from (str(path) for path in temporary.iterdir())
    for name in set(os.listdir("/dev/shm")) - shared_memory:
        kind, _, rest = name.partition(
            "_"
        )  # torch's files: torch_PID_...; other jobs of this machine have some too
        if kind == "torch" and not psutil.pid_exists(int(rest.partition("_")[0])):
            yield f"/dev/shm/{name}"
