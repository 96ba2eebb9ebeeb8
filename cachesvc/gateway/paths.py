"""Paths of objects, for programs that open or map a file: `cachesvc.path`."""

from __future__ import annotations

import fcntl
import logging
import mmap
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

from cachesvc.catalog.options import Options
from cachesvc.core.errors import DaemonUnavailable, OutOfSpace, TierFailed
from cachesvc.core.safe_text import redacted
from cachesvc.gateway.snapshots import Snapshot, SnapshotFile, Snapshots
from cachesvc.gateway.urls import stripped, uri_of
from cachesvc.sources.uri import local_path
from cachesvc.system.huge_pages import SIZE_SEALS

_WHOLE = Options(format="whole", split="all")
_SEALS = SIZE_SEALS | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
_STEP_BYTES, _THREADS = 8 << 20, 8
"""Without a shared copy, so many bytes are read at a time, by so many threads: as a fill reads them."""
_log = logging.getLogger("cachesvc")


@contextmanager
def path(uri: str | os.PathLike[str]) -> Iterator[str]:
    """Give a read-only path of one object while the block runs, for programs that open or map a file by its name.

    `uri`: an object or file, as `open_dataset` or `cachesvc://` names it. The path is `/proc/self/fd/N`: threads and forked
    children may open it, other programs cannot. The file is of one version and never changes. All processes of the node
    that map it share the daemon's copy in RAM, which is not evicted before the block ends; a mapping may outlive the block.
    Where the daemon's copy lies on NVMe, and without a daemon, the bytes are copied to memory of this process. Without a
    daemon a local file is given as it is.

    Raises NotFound for an object that does not exist or is empty, IsADirectoryError for a folder, and what opening and
    reading a dataset raises. Without credentials for the source, OutOfSpace for an object larger than every tier.
    """
    name = os.fspath(uri)
    absolute = name if "://" in name else os.path.abspath(os.path.expanduser(name))
    snapshot, file = Snapshots(options=_WHOLE).file(uri_of(stripped(absolute)))
    with ExitStack() as held:
        yield _path_of(snapshot, file, held)


def _path_of(snapshot: Snapshot, file: SnapshotFile, held: ExitStack) -> str:
    """Return a path that exists until `held` is closed."""
    uri, size_bytes = file.version.uri, file.version.size_bytes
    if snapshot.leased is not None:
        lease = snapshot.leased.lease(file.address, wait=not snapshot.direct)
        try:
            leased = held.enter_context(lease)
        except (DaemonUnavailable, OutOfSpace, TierFailed) as error:
            if not snapshot.direct:
                raise
            _log.warning("%s: reading %s directly from the source", error, redacted(uri))
        else:
            if os.fstat(leased.fd).st_size == size_bytes:
                own = fcntl.fcntl(leased.fd, fcntl.F_DUPFD_CLOEXEC, 0)  # a forked child closes the lease's
                held.callback(os.close, own)
                return f"/proc/self/fd/{own}"
            _log.info("%s lies on a disk: copying its %d bytes to memory", redacted(uri), size_bytes)
    elif (local := local_path(uri)) is not None:
        return local
    memory = _read(snapshot, file)
    held.callback(os.close, memory)
    return f"/proc/self/fd/{memory}"


def _read(snapshot: Snapshot, file: SnapshotFile) -> int:
    """Return a read-only descriptor of a sealed memfd with the bytes of a file."""
    size_bytes = file.version.size_bytes
    own = os.memfd_create("cachesvc-path", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(own, size_bytes)
        with mmap.mmap(own, size_bytes) as memory, memoryview(memory) as view:
            _fill(snapshot, file, view)
        fcntl.fcntl(own, fcntl.F_ADD_SEALS, _SEALS)
        return os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(own)


def _fill(snapshot: Snapshot, file: SnapshotFile, view: memoryview) -> None:
    def part(at: int) -> None:
        with view[at : at + _STEP_BYTES] as into:
            snapshot.read_into(file, at, into)

    with ThreadPoolExecutor(_THREADS, "cachesvc-path") as pool:
        for done in [pool.submit(partial(part, at)) for at in range(0, len(view), _STEP_BYTES)]:
            done.result()
