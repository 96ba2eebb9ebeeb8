"""Grants without a daemon: extents are filled from the source into memory of this process, ahead of need."""

from __future__ import annotations

import fcntl
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from cachesvc.client.protocol import CLOSED, Granted, Refused
from cachesvc.core.errors import CacheError, DeadlineExceeded
from cachesvc.core.model import Extent
from cachesvc.system.fork_hooks import abandon_in_children
from cachesvc.system.huge_pages import SIZE_SEALS
from cachesvc.tiers.os_errors import translated

DIRECT_BYTES = 2 << 30
"""Private memory of one process: eight windows of 256 MiB. A daemon shares memory; this does not."""
READ_AHEAD = 4
"""Extents filled ahead of the plan's cursor: enough to hide a source's latency behind the reading of one."""


@dataclass(slots=True)
class _Copy:
    """One extent in a private memfd."""

    fd: int
    size_bytes: int
    filled: Future[str]
    """Ends with the fill; its result names the holes."""
    leases: int = 0


class DirectGrants:
    """Fills extents in this process. At most `budget_bytes` are held (one extent always may be); the least recently used
    extents without a lease are evicted first."""

    def __init__(
        self,
        extent_of: Callable[[int], Extent],
        fill: Callable[[Extent, int], str],
        take: Callable[[int], float],
        budget_bytes: int = DIRECT_BYTES,
    ) -> None:
        """`fill(extent, descriptor)` writes an extent's bytes and returns its holes, or raises a typed error.
        `take(bytes)` returns the seconds to wait before so many are fetched."""
        self._extent_of, self._fill, self._budget, self._take = extent_of, fill, budget_bytes, take
        self._closing = threading.Event()
        self._copies: OrderedDict[int, _Copy] = OrderedDict()
        self._used = 0
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="cachesvc-direct")
        self._plan: Sequence[int] = ()
        self._position: dict[int, int] = {}
        """The position of each extent in the plan."""
        self._cursor = 0
        """Extents before this position of the plan are evicted for those filled ahead."""
        abandon_in_children(self)

    def follow(self, extents: Sequence[int], budget_bytes: int | None = None) -> None:
        """Fill ahead in this order of need from now on, within this budget if one is given."""
        with self._lock:
            self._budget = self._budget if budget_bytes is None else budget_bytes
            self._plan, self._position = extents, {extent: at for at, extent in enumerate(extents)}

    def prepare(self, extents: Sequence[int]) -> tuple[set[int], set[int]]:
        """Begin to fill extents, and those that come next, as far as there is room. Returns the extents that are filled,
        and those for which leased ones leave no room."""
        found: dict[int, _Copy | None] = {}
        with self._lock, suppress(OSError):  # too many open files
            found = {extent: self._begin(extent, needed=True) for extent in extents}
            self._read_ahead(extents)
        fills = {extent: copy.filled for extent, copy in found.items() if copy is not None}
        filled = {extent for extent, fill in fills.items() if fill.done() and fill.exception() is None}
        return filled, found.keys() - fills.keys()

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`. Raises what the source raises."""
        self._check_open()
        leased: list[_Copy] = []
        try:
            with ExitStack() as descriptors:
                answers = self._lease(extents, leased, descriptors)
                filling = [copy.filled for copy in leased]
                late = wait(filling, timeout_s).not_done
                failure = next((f.exception() for f in filling if f.done() and f.exception()), None)
                if failure is None and late:
                    failure = DeadlineExceeded(
                        f"the source did not deliver {len(late)} extents in {timeout_s:.0f} s"
                    )
                if failure is not None:
                    raise failure
                descriptors.pop_all()
                return [self._with_holes(answer) for answer in answers]
        except BaseException:
            with self._lock:  # not by index: another call may have replaced a failed copy
                for copy in leased:
                    copy.leases -= 1
            raise

    def _lease(
        self, extents: Sequence[int], leased: list[_Copy], descriptors: ExitStack
    ) -> list[Granted | Refused]:
        """Add copies to `leased`, and the descriptors of the answers to `descriptors`. Needed extents get descriptors
        before extents are filled ahead."""
        answers: dict[int, Granted | Refused] = {}
        with self._lock, translated("memory for extents", "hold one more"):
            for extent in extents:
                copy = self._begin(extent, needed=True)
                if copy is None:
                    answers[extent] = Refused(extent)
                    continue
                copy.leases += 1  # at once: the next extent must not evict this one
                leased.append(copy)
                if extent not in answers:
                    fd = os.dup(copy.fd)
                    descriptors.callback(os.close, fd)
                    answers[extent] = Granted(extent, fd, 0, copy.size_bytes, "direct")
            self._read_ahead(extents)
        return list(answers.values())

    def _with_holes(self, answer: Granted | Refused) -> Granted | Refused:
        """The answer, with the holes that are known now that the copy is filled."""
        if isinstance(answer, Refused):
            return answer
        with self._lock:
            return answer._replace(holes=self._copies[answer.extent].filled.result())

    def release(self, extents: Sequence[int]) -> None:
        """See `Grants`; a released extent stays until its room is needed."""
        with self._lock:
            for extent in extents:
                if extent in self._copies:
                    self._copies[extent].leases -= 1

    def passed(self, step: int) -> None:
        """See `Grants`. Has no effect: the cursor follows the acquired extents."""

    def close(self) -> None:
        """See `Grants`. Waits for the fills in flight."""
        self._closing.set()
        self._pool.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            for copy in self._copies.values():
                os.close(copy.fd)
            self._copies.clear()
            self._used = 0

    def abandon(self) -> None:
        """Close the parent's copies in a forked child."""
        for copy in self._copies.values():
            os.close(copy.fd)
        self._copies.clear()

    def _begin(self, extent: int, needed: bool) -> _Copy | None:
        """The extent's copy, its fill begun or done; None when there is no room."""
        found = self._copies.get(extent)
        if found is not None and not (found.filled.done() and found.filled.exception()):
            self._copies.move_to_end(extent)
            return found
        if found is not None:
            self._discard(extent)  # failed before: retry
        wanted = self._extent_of(extent)
        if not self._reserve(wanted.size_bytes, needed):
            return None
        fd = os.memfd_create("cachesvc-direct", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, wanted.size_bytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SIZE_SEALS)
        except OSError:
            os.close(fd)
            raise
        copy = _Copy(fd, wanted.size_bytes, self._pool.submit(self._run, wanted, fd))
        self._copies[extent] = copy
        self._used += wanted.size_bytes
        return copy

    def _run(self, extent: Extent, fd: int) -> str:
        self._closing.wait(self._take(extent.stored_bytes))
        self._check_open()
        return self._fill(extent, fd)

    def _check_open(self) -> None:
        if self._closing.is_set():
            raise CacheError(CLOSED)

    def _reserve(self, size_bytes: int, needed: bool) -> bool:
        evictable = [e for e in self._copies if needed or self._position.get(e, -1) < self._cursor]
        for extent in [e for e in evictable if self._copies[e].leases <= 0]:
            if self._used + size_bytes <= self._budget:
                break
            if self._copies[extent].filled.done():
                self._discard(extent)
        return self._used + size_bytes <= self._budget or (needed and not self._copies)

    def _discard(self, extent: int) -> None:
        copy = self._copies.pop(extent)
        os.close(copy.fd)
        self._used -= copy.size_bytes

    def _read_ahead(self, extents: Sequence[int]) -> None:
        at = max((self._position.get(extent, -1) for extent in extents), default=-1)
        self._cursor = at
        for extent in self._plan[at + 1 : at + 1 + READ_AHEAD]:
            if extent not in self._copies:
                with suppress(OSError):  # too many open files: needed extents are read all the same
                    self._begin(extent, needed=False)
