"""Search for leftovers of killed processes: processes, files, sockets, leases, memory. There must be none."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

from cachesvc.client.control import Control
from cachesvc.core.errors import CacheError
from cachesvc.core.model import DatasetId
from testbed.node import Daemon, open_files

TOKEN = "CACHESVC_KILLS"
"""The environment variable that every process of a drill inherits."""
OUTLIVE_S = 15.0
"""An orphan must end within this time. Most end at once; a filler that is still starting, at its low priority, ends
when it has started."""
POLL_INTERVAL_S = 0.2
LEFT_S = 45.0
"""A process that has not ended by then is left behind; one that ends earlier is only late."""
SETTLE_S = 10.0


class Orphans:
    """Processes whose parent was killed. Those that take too long to end are in `late`."""

    def __init__(self) -> None:
        self._dying: list[tuple[psutil.Process, float]] = []
        """Each with its deadline."""
        self._poll_at = 0.0
        self.late: list[str] = []

    def add(self, processes: Iterable[psutil.Process]) -> None:
        """Watch these processes, which must end from now on."""
        deadline = time.monotonic() + OUTLIVE_S
        self._dying += [(process, deadline) for process in processes]

    def poll(self) -> None:
        """Drop processes that have ended, and note those past their deadline."""
        now = time.monotonic()
        if now < self._poll_at:
            return
        self._poll_at = now + POLL_INTERVAL_S
        living = [(process, deadline) for process, deadline in self._dying if _lives(process)]
        self._dying = [(process, deadline) for process, deadline in living if now < deadline]
        self.late += [
            f"{_described(process)} outlived its parent" for process, deadline in living if now >= deadline
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
    """Processes of the drill that do not end, and those that end late, found by `token` in their environment. This
    process and its children, which start the trainers, do not count."""
    late = _after(OUTLIVE_S, token)
    left = _after(LEFT_S - OUTLIVE_S, token) if late else []
    return left, [each for each in late if each not in left]


def _after(limit_s: float, token: str) -> list[str]:
    deadline = time.monotonic() + limit_s
    while (left := _marked(token)) and time.monotonic() < deadline:
        time.sleep(POLL_INTERVAL_S)
    return left


def _marked(token: str) -> list[str]:
    own, marked = {os.getpid(), *(child.pid for child in psutil.Process().children())}, []
    for process in psutil.process_iter():
        try:
            if process.pid not in own and process.environ().get(TOKEN) == token:
                marked.append(_described(process))
        except psutil.Error:  # it has ended meanwhile, or belongs to another user
            continue
    return marked


def in_daemon(daemon: Daemon) -> Iterator[str]:
    """Leases, readers and memory that a daemon still counts when no reader is left."""
    assert daemon.process is not None
    with Control(daemon.socket_dir) as control:
        deadline = time.monotonic() + SETTLE_S
        while (left := [*_counted(control), *_memory(daemon.process.pid)]) and time.monotonic() < deadline:
            time.sleep(0.1)
    yield from left


def _counted(control: Control) -> Iterator[str]:
    try:
        busy = sum(control.evict(DatasetId(row.dataset.id)).busy_bytes for row in control.list())
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
    """Extents in memory. None may be left after all were evicted."""
    for name in open_files(pid):
        if name.startswith("/memfd:cachesvc:"):
            yield f"the daemon holds {name}"


def files(daemon: Daemon, nvme: Path, temporary: Path, shared_memory: set[str]) -> Iterator[str]:
    """Files left when all processes have ended, the daemon included, and all extents were evicted."""
    for folder, expected in ((Path(daemon.socket_dir), {"lock"}), (nvme / "cachesvc-nvme/v1/tmp", set())):
        yield from (f"{folder}/{name}" for name in set(os.listdir(folder)) - expected)
    extents = nvme / "cachesvc-nvme/v1/extents"
    yield from (str(path) for path in extents.rglob("*") if path.is_file())
    catalogs = daemon.root / "state/catalogs"
    yield from (str(path) for path in catalogs.iterdir() if path.suffix != ".lmdb")
    yield from (str(path) for path in temporary.iterdir())
    for name in set(os.listdir("/dev/shm")) - shared_memory:
        kind, _, rest = name.partition("_")  # torch_PID_...: other jobs on this machine have such files too
        if kind == "torch" and not psutil.pid_exists(int(rest.partition("_")[0])):
            yield f"/dev/shm/{name}"
