"""Grants without a daemon: ranges of local files in place, all other extents from memory of this process, into which they
are filled ahead of need. Extents of local files are copied into such memory, too, where that pays.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from cachesvc.client.protocol import CLOSED, Granted, Refused
from cachesvc.core.errors import (
    CacheError,
    DeadlineExceeded,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)
from cachesvc.core.model import Extent, ObjectVersion, Piece
from cachesvc.sources.files import etag_of
from cachesvc.sources.uri import local_path
from cachesvc.system.fill_target import OnBytes, ignore_bytes
from cachesvc.system.fork_hooks import abandon_in_children
from cachesvc.system.huge_pages import SIZE_SEALS
from cachesvc.tiers.checksum import StreamedChecksums
from cachesvc.tiers.tier import translated

DIRECT_BYTES = 2 << 30
"""Private memory of one process: eight windows of 256 MiB. A daemon shares memory; this does not."""
READ_AHEAD = 4
"""Extents filled ahead of the plan's cursor: enough to hide a source's latency behind the reading of one."""


class _Filled(NamedTuple):
    """The end of a fill: the holes of the extent, and the digest of its bytes, b"" for a copy of a local file."""

    holes: str
    content: bytes


@dataclass(slots=True)
class _Copy:
    """One extent in a private memfd."""

    fd: int
    size_bytes: int
    of_file: bool
    """A local file has the same bytes, and is granted in place until they are copied."""
    filled: Future[_Filled]
    leases: int = 0

    @property
    def is_filled(self) -> bool:
        return self.filled.done() and not self.filled.exception()


class DirectGrants:
    """Grants the extents of one dataset out of this process. At most `fill_bytes` of fills are held (one extent always may
    be), and copies of local files within a budget of their own. Of each the least recently used without a lease are evicted
    first."""

    def __init__(
        self,
        extent_of: Callable[[int], Extent],
        fill: Callable[[Extent, int, OnBytes], str],
        take: Callable[[int], float],
        fill_bytes: int = DIRECT_BYTES,
    ) -> None:
        """`fill(extent, descriptor, passing)` writes an extent's bytes, calls `passing(at, data)` with what it has written,
        and returns the extent's holes, or raises a typed error. `take(bytes)` returns the seconds to wait before so many
        are fetched, other than from local files."""
        self._extent_of, self._fill, self._take = extent_of, fill, take
        self._budgets = {False: fill_bytes, True: 0}
        """Bytes by `_Copy.of_file`, as in `_used`."""
        self._used = Counter[bool]()
        self._copies: OrderedDict[int, _Copy] = OrderedDict()
        self._refused: set[int] = set()
        """Local files for whose copies there was no room at the last request."""
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="cachesvc-direct")
        self._closing = threading.Event()
        self._plan: Sequence[int] = ()
        self._position: dict[int, int] = {}
        """The position of each extent in the plan."""
        self._cursor = 0
        """Extents before this position of the plan are evicted for those filled ahead."""
        abandon_in_children(self)

    def follow(self, extents: Sequence[int], copy_bytes: int = 0) -> None:
        """Fill ahead in this order of need from now on. Copy those of local files, too, within this budget if it is not
        0. Until a copy is filled, its file is granted, for one read at a time."""
        with self._lock:
            self._budgets[True] = copy_bytes
            self._plan, self._position = extents, {extent: at for at, extent in enumerate(extents)}

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`. Raises what the source raises; for local files NotFound or SourceChanged when one is not the
        version in the catalog, NotAllowed, and SourceUnavailable where it cannot be opened now."""
        self._check_open()
        wanted = {index: self._extent_of(index) for index in extents}
        files = {index: file for index, each in wanted.items() if (file := _file_of(each)) is not None}
        with ExitStack() as undo:
            copies, refused = self._lease(wanted, files, undo)
            answers: list[Granted | Refused] = [Refused(index) for index in refused]
            for index in files.keys() - copies.keys() - refused:
                answers.append(self._grant_in_place(index, *files[index], undo))
            self._read_ahead(extents)  # now that all needed extents have their descriptors
            self._await([copy.filled for _, copy in copies.values()], timeout_s)
            answers += [
                granted._replace(**copy.filled.result()._asdict()) for granted, copy in copies.values()
            ]
            undo.pop_all()
            return answers

    def release(self, extents: Sequence[int]) -> None:
        """See `Grants`. A released copy stays until its room is needed; a file's lease is its descriptor."""
        with self._lock:
            for extent in extents:
                copy = self._copies.get(extent)
                if copy is not None and copy.leases:
                    copy.leases -= 1

    def passed(self, step: int) -> None:
        """See `Grants`. Has no effect: the cursor follows the acquired extents."""

    def close(self) -> None:
        """See `Grants`. The memory of a fill in flight is freed when it ends. Nothing is awaited: a finalizer may run in
        the thread of that fill, or while another thread starts."""
        with self._lock:
            self._closing.set()
            copies = list(self._copies.values())
            self._copies.clear()
            self._used.clear()
        self._pool.shutdown(wait=False)
        for copy in copies:
            copy.filled.add_done_callback(partial(_close, copy.fd))

    def abandon(self) -> None:
        """Close the parent's copies in a forked child."""
        for copy in self._copies.values():
            os.close(copy.fd)
        self._copies.clear()

    # ---- inside

    def _lease(
        self, wanted: Mapping[int, Extent], files: Container[int], undo: ExitStack
    ) -> tuple[dict[int, tuple[Granted, _Copy]], set[int]]:
        """Lease the copies of extents, begun or filled, and return those that are refused. For the other local files,
        whose copies are not filled or not wanted, return neither."""
        leased: dict[int, tuple[Granted, _Copy]] = {}
        refused, short = set[int](), set[int]()
        with self._lock, translated("memory for extents", "hold one more"):
            for index, extent in wanted.items():
                of_file = index in files
                if of_file and not self._is_copied(index):
                    continue
                copy = self._begin(index, extent, of_file, needed=True)
                if copy is None:
                    (short if of_file else refused).add(index)
                elif copy.is_filled or not of_file:
                    leased[index] = self._grant(index, copy, undo), copy
            # The reader releases what it does not need, and asks again.
            self._refused = short - self._refused
            return leased, refused | self._refused

    def _grant(self, index: int, copy: _Copy, undo: ExitStack) -> Granted:
        """Lease a copy at once: the next extent must not evict it."""

        def end_lease() -> None:
            with self._lock:  # not by index: another call may have replaced a failed copy
                copy.leases -= 1

        copy.leases += 1
        undo.callback(end_lease)
        fd = os.dup(copy.fd)
        undo.callback(os.close, fd)
        return Granted(index, fd, 0, copy.size_bytes, "direct")

    def _grant_in_place(self, index: int, piece: Piece, path: str, undo: ExitStack) -> Granted:
        fd = _open(piece, path)
        undo.callback(os.close, fd)
        once = self._is_copied(index)
        return Granted(index, fd, piece.offset, piece.length, "local", once=once, brief=once)

    def _is_copied(self, index: int) -> bool:
        """Whether a local file's extent is to be read from a copy."""
        return self._budgets[True] > 0 and index in self._position

    def _await(self, fills: Sequence[Future[_Filled]], timeout_s: float) -> None:
        late = wait(fills, timeout_s).not_done
        self._check_open()
        failure = next((fill.exception() for fill in fills if fill.done() and fill.exception()), None)
        if failure is None and late:
            failure = DeadlineExceeded(f"the source did not deliver {len(late)} extents in {timeout_s:.0f} s")
        if failure is not None:
            raise failure

    def _begin(self, index: int, extent: Extent, of_file: bool, needed: bool) -> _Copy | None:
        """The extent's copy, its fill begun or done; None when there is no room, or no descriptor and a file to read in its
        place."""
        self._check_open()
        found = self._copies.get(index)
        if found is not None and (found.is_filled or not found.filled.done()):
            self._copies.move_to_end(index)
            return found
        if found is not None:
            self._discard(index)  # failed before: retry
        if not self._reserve(extent.size_bytes, of_file, needed):
            return None
        try:
            fd = _memory(extent.size_bytes)
        except OSError:
            if not of_file:
                raise
            return None
        filled = self._pool.submit(self._run, extent, fd, of_file)
        copy = self._copies[index] = _Copy(fd, extent.size_bytes, of_file, filled)
        self._used[of_file] += extent.size_bytes
        return copy

    def _run(self, extent: Extent, fd: int, of_file: bool) -> _Filled:
        self._check_open()
        if of_file:  # a run's digest reads the file when it is asked for
            return _Filled(self._fill(extent, fd, ignore_bytes), b"")
        self._closing.wait(self._take(extent.stored_bytes))
        self._check_open()
        passing = StreamedChecksums(extent.size_bytes)
        holes = self._fill(extent, fd, passing.add)
        return _Filled(holes, passing.checksums(fd).content)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise CacheError(CLOSED)

    def _reserve(self, size_bytes: int, of_file: bool, needed: bool) -> bool:
        most = self._budgets[of_file] - size_bytes
        for extent, copy in list(self._copies.items()):
            if self._used[of_file] <= most:
                break
            evictable = needed or self._position.get(extent, -1) < self._cursor
            if copy.of_file is of_file and evictable and not copy.leases and copy.filled.done():
                self._discard(extent)
        return self._used[of_file] <= most or (needed and not self._used[of_file])

    def _discard(self, extent: int) -> None:
        copy = self._copies.pop(extent)
        os.close(copy.fd)
        self._used[copy.of_file] -= copy.size_bytes

    def _read_ahead(self, extents: Iterable[int]) -> None:
        with self._lock:
            self._cursor = max((self._position.get(index, -1) for index in extents), default=-1)
            for index in self._plan[self._cursor + 1 : self._cursor + 1 + READ_AHEAD]:
                if index in self._copies:
                    continue
                extent = self._extent_of(index)
                of_file = _file_of(extent) is not None
                if not of_file or self._is_copied(index):
                    with suppress(OSError):  # too many open files: needed extents are read all the same
                        self._begin(index, extent, of_file, needed=False)


def _close(fd: int, _: Future[_Filled]) -> None:
    os.close(fd)


def _file_of(extent: Extent) -> tuple[Piece, str] | None:
    """Return the range of a local file that an extent is, and the file's path; None for other extents: of several pieces,
    compressed, or of a remote object."""
    pieces = extent.pieces
    path = local_path(pieces[0].object.uri) if len(pieces) == 1 and not pieces[0].codec else None
    return None if path is None else (pieces[0], path)


def _memory(size_bytes: int) -> int:
    """Return a new memfd of a sealed size. Raises OSError."""
    fd = os.memfd_create("cachesvc-direct", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size_bytes)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def _open(piece: Piece, path: str) -> int:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{path} is gone since the dataset was opened; open it again") from None
    except PermissionError:
        raise NotAllowed(f"{path} may not be read by this user") from None
    except OSError as error:  # too many open files, a stale handle: the sample is not bad
        raise SourceUnavailable(f"{path} cannot be opened: {error.strerror}; try again when it can") from None
    found = os.fstat(fd)
    etag = piece.object.etag
    if found.st_size != piece.object.size_bytes or (etag and etag != etag_of(found)):
        os.close(fd)
        raise changed(path)
    return fd


def written_to(found: os.stat_result, stored: ObjectVersion) -> bool:
    """True if a file was modified after it was opened at this version. A new ctime does not count: unlinking sets it."""
    mtime = stored.etag.rpartition("-")[0]
    return found.st_size != stored.size_bytes or (bool(mtime) and mtime != str(found.st_mtime_ns))


def changed(path: str) -> SourceChanged:
    """The error for a request of a version that is gone."""
    return SourceChanged(f"{path} changed since the dataset was opened; open it again")
