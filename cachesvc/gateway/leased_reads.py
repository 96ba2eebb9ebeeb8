"""Reads ranges of a dataset's address space out of extents that the daemon leases to this process.

Descriptors are read with `preadv`, RAM and NVMe alike, so nothing is mapped and no more than the range is copied. An
extent stays leased while reads need it, and until it was not read for a second. A connection that was not used for ten
seconds is closed, which ends the claim on the dataset.

Extents are fetched ahead of a program that reads files in the order of their names, or a file from its beginning. Extents
lie in that order, so such a program touches one after the other, perhaps from several threads. A program that reads here
and there touches extents that lie apart, and nothing is fetched ahead of it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial

import numpy as np

from cachesvc.catalog.columns import Ints
from cachesvc.client.failover import FailoverGrants, RoomWait
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.keepalive import start_polling, stop_polling
from cachesvc.client.protocol import Granted, Grants
from cachesvc.core.errors import DaemonUnavailable, OutOfSpace, TierFailed
from cachesvc.core.holes import Holes
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from cachesvc.system.fork_hooks import abandon_in_children

_log = logging.getLogger("cachesvc")
MAX_LEASED, MAX_LEASED_BYTES = 128, 1 << 30
"""Extents leased while no read needs them, for a second."""
IDLE_POLLS = 10
"""Polls, one a second, after which an unused connection is closed."""
PATTERN = 3
"""Extents that lie close together before any is fetched ahead."""
MOST = 64
MOST_BYTES = 64 << 20
"""What is fetched ahead is twice what was read in order, within these two."""
GAPS = 1.34
"""What was read in order may leave out a quarter: other threads are about to read it."""


class Ahead:
    """The pattern in the reads of one dataset. Not thread-safe."""

    def __init__(self, sizes: Ints) -> None:
        """`sizes`: bytes of each extent."""
        self._sizes = sizes
        self._recent: deque[int] = deque(maxlen=MOST // 2)
        """Extents that were read in order, distinct."""
        self._planned = range(0)

    @property
    def planned(self) -> bool:
        """True while extents are fetched ahead."""
        return bool(self._planned)

    def read(self, extent: int, last: int) -> range | None:
        """Note that a read begins to need an extent, and goes on to `last`. Return the extents to fetch ahead of it, in
        place of those returned before: none where the pattern ends; None where they stay."""
        if extent not in self._recent:
            self._recent.append(extent)
        while max(self._recent) - min(self._recent) + 1 > GAPS * len(self._recent):
            self._recent.popleft()
        count, front = len(self._recent), max(self._recent)
        forward = count >= PATTERN and extent > front - count / 2
        most = max(2 * count if forward else 0, last - extent)
        found = self._within(extent if last > extent else front, min(most, MOST))
        if not found and (count >= PATTERN or not self._planned):
            return None
        if found and extent < self._planned.stop and self._planned.stop - found.start > len(found) // 2:
            return None  # half of them are still ahead
        self._planned = found
        return found

    def _within(self, front: int, most: int) -> range:
        stop, size = front + 1, 0
        while stop <= min(front + most, len(self._sizes) - 1) and size + self._sizes[stop] <= MOST_BYTES:
            size += int(self._sizes[stop])
            stop += 1
        return range(front + 1, stop)


class LeasedExtent:
    """A leased extent. `users`: the reads that need it. `read`: it was read since the last poll. `ends`: it is released
    after the last of its reads. `brief`: see `Granted`."""

    __slots__ = ("brief", "ends", "extent", "fd", "grants", "holes", "offset", "read", "users")

    def __init__(self, granted: Granted, grants: Grants, holes: Holes | None) -> None:
        self.extent, self.fd, self.offset, self.grants = granted.extent, granted.fd, granted.offset, grants
        self.holes, self.users, self.read = holes, 1, True
        self.ends, self.brief = granted.once, granted.brief


class _Connected:
    """The grants of one connection: `daemon` fails without a daemon, `waiting` waits for one."""

    def __init__(self, daemon: DaemonGrants, open_again: Callable[[], None]) -> None:
        self.daemon, self.waiting = daemon, FailoverGrants(daemon, None)
        daemon.opens_again(open_again)
        abandon_in_children(daemon)


class LeasedReads:
    """The reads of one dataset in this process. Safe to share between threads; a forked child connects by itself."""

    def __init__(
        self,
        directory: str,
        dataset: DatasetId,
        open_again: Callable[[int], None],
        timeout_s: float,
        claims: bool = True,
    ) -> None:
        """Connect, and map the catalog. `directory` holds the daemon's sockets. `open_again(extent_bytes)` has the daemon
        compile the same version once more. `timeout_s`: how long a read waits for an extent. Without a claim the daemon
        keeps nothing for these reads, and fetches nothing ahead. Raises what connecting raises."""
        self.dataset, self._directory, self._open_again, self._timeout_s = (
            dataset,
            directory,
            open_again,
            timeout_s,
        )
        self._claims = claims
        daemon = DaemonGrants(directory, dataset, claims=claims)
        self.catalog = daemon.open_catalog()
        self._lock = threading.RLock()
        self._leased: OrderedDict[int, LeasedExtent] = OrderedDict()
        self._ahead = Ahead(self.catalog.extent_sizes)
        self._idle_polls = 0
        self._reading = 0
        """Reads in progress, which may wait for longer than an idle connection lives."""
        self._connected: _Connected | None = None
        self._process = os.getpid()
        """The process whose connection it is: a child that drops it closes nothing of its parent's."""
        self._connect(daemon)

    def read_into(self, address: int, into: memoryview, wait: bool) -> None:
        """Fill `into` with the bytes from `address` on. `wait`: for a daemon that is gone, and for room.

        Raises DaemonUnavailable, DeadlineExceeded, OutOfSpace, TierFailed where a tier cannot be read, and the errors of
        fills.
        """
        with self._in_use():
            self._read_parts(address, into, wait)

    @contextmanager
    def _in_use(self) -> Iterator[None]:
        """Keep the connection while the block runs."""
        with self._lock:
            self._reading, self._idle_polls = self._reading + 1, 0
        try:
            yield
        finally:
            with self._lock:
                self._reading -= 1

    def _read_parts(self, address: int, into: memoryview, wait: bool) -> None:
        starts, sizes = self.catalog.extent_starts, self.catalog.extent_sizes
        last = int(np.searchsorted(starts, address + len(into), "left")) - 1
        while len(into):
            extent = int(np.searchsorted(starts, address, "right")) - 1
            offset = address - int(starts[extent])
            part = into[: int(sizes[extent]) - offset]
            try:
                self._read_part(extent, last, wait, offset, part)
            except TierFailed as error:
                if self._connected is None:
                    raise
                _log.warning("%s; requesting it again", error)
                self._connected.daemon.suspect([extent])
                self._read_part(extent, last, wait, offset, part)
            address, into = address + len(part), into[len(part) :]

    def _read_part(self, extent: int, last: int, wait: bool, offset: int, into: memoryview) -> None:
        with self._lease(extent, last, wait, self._timeout_s) as leased:
            if leased.holes is not None:
                leased.holes.check(offset, len(into))
            self._read(leased, leased.offset + offset, into)

    @contextmanager
    def lease(self, address: int, wait: bool) -> Iterator[LeasedExtent]:
        """Lease the extent that begins at `address` while the block runs. A large one may take longer than a read: the
        time limit of a read counts for each GiB of it. Raises as `read_into`."""
        extent = int(np.searchsorted(self.catalog.extent_starts, address, "right")) - 1
        limit_s = self._timeout_s * max(1, int(self.catalog.extent_sizes[extent]) >> 30)
        with self._in_use(), self._lease(extent, extent, wait, limit_s) as leased:
            yield leased

    def poll(self) -> None:
        """Release extents that the daemon recalls or that no read needed since the last poll. See `Polled`."""
        connected = self._connected
        if connected is None:
            return
        recalled = connected.daemon.recalled()
        with self._lock:
            for leased in list(self._leased.values()):
                leased.ends |= leased.extent in recalled or not leased.read
                leased.read = False
            self._release_ended()
            self._idle_polls += 1
            if self._idle_polls >= IDLE_POLLS and not (self._leased or self._reading):
                self.close()

    def close(self) -> None:
        """Release every extent and end the connection. A later read connects again."""
        with self._lock:
            connected, self._connected = self._connected, None
            for leased in self._leased.values():
                leased.ends = True
            self._release_ended()
            stop_polling(self)
        if connected is not None:
            connected.waiting.close()

    def __del__(self) -> None:
        if getattr(self, "_process", 0) == os.getpid():
            self.close()

    def abandon(self) -> None:
        """Close inherited descriptors in a forked child, and send nothing."""
        for leased in self._leased.values():
            os.close(leased.fd)
            leased.fd = -1
        self._leased.clear()
        self._lock, self._connected, self._reading = threading.RLock(), None, 0
        self._process = os.getpid()

    def _connect(self, daemon: DaemonGrants | None = None) -> _Connected:
        with self._lock:
            if self._connected is None:
                grants = daemon or DaemonGrants(self._directory, self.dataset, claims=self._claims)
                self._connected = _Connected(grants, partial(self._open_again, self.catalog.extent_bytes))
                self._idle_polls = 0
                start_polling(self)
                abandon_in_children(self)
            return self._connected

    @contextmanager
    def _lease(self, extent: int, last: int, wait: bool, limit_s: float) -> Iterator[LeasedExtent]:
        with self._lock:
            leased = self._leased.get(extent)
            if leased is not None and leased.ends:
                leased = None
            if leased is not None:
                self._leased.move_to_end(extent)
                leased.users, leased.read = leased.users + 1, True
        if leased is None:
            if self._claims:
                self._fetch_ahead(extent, last)
            leased = self._acquire(extent, wait, limit_s)
        try:
            yield leased
        finally:
            with self._lock:
                leased.users -= 1
                self._release_if_ended(leased)

    def _fetch_ahead(self, extent: int, last: int) -> None:
        """Tell the daemon what is needed next, as a plan whose steps are the numbers of extents."""
        with self._lock:
            planned = self._ahead.read(extent, last)
            if planned is None and not self._ahead.planned:
                return
        with suppress(DaemonUnavailable, OutOfSpace):  # it is fetched when it is needed
            daemon = self._connect().daemon
            if planned is not None:
                rows = np.asarray(planned, np.int64)
                daemon.submit(Plan(rows, rows, rows))
            daemon.passed(extent)

    def _acquire(self, extent: int, wait: bool, limit_s: float) -> LeasedExtent:
        """Lease an extent; another thread may lease it meanwhile, too. Raises OutOfSpace where there is no room."""
        connected = self._connect()
        grants: Grants = connected.waiting if wait else connected.daemon
        size_bytes = int(self.catalog.extent_sizes[extent])
        self._make_room(MAX_LEASED - 1, MAX_LEASED_BYTES - size_bytes)
        made: list[LeasedExtent] = []

        def leased() -> bool:
            [answer] = grants.acquire([extent], limit_s)
            if isinstance(answer, Granted):
                made.append(self._add(answer, grants))
            elif (budgets := connected.daemon.tier_budgets) and size_bytes > max(budgets):
                raise OutOfSpace(
                    f"{self.catalog.uri} is cached in {size_bytes:,} bytes at once, and the largest tier of the daemon"
                    f" holds {max(budgets):,}: give it more --ram or --nvme"
                )
            else:
                self._make_room(0, 0)
            return bool(made)

        RoomWait(limit_s if wait else 0.0).until(
            leased,
            f"the daemon has no room for an extent of {self.catalog.uri}; give it more --ram or --nvme",
        )
        return made[0]

    def _add(self, granted: Granted, grants: Grants) -> LeasedExtent:
        holes = Holes(self.catalog.extent(granted.extent), granted.holes) if granted.holes else None
        made = LeasedExtent(granted, grants, holes)
        with self._lock:
            for before in self._leased.values():
                before.ends |= before.brief and not before.users
            self._release_ended()
            if granted.extent in self._leased:  # by another thread: this lease ends with its read
                made.ends = True
            else:
                self._leased[granted.extent] = made
        return made

    def _read(self, leased: LeasedExtent, offset: int, into: memoryview) -> None:
        """Read a copy. One that cannot be read is not leased any longer than this read."""
        why = "it is too short"
        try:
            while len(into) and (done := os.preadv(leased.fd, [into], offset)):
                offset, into = offset + done, into[done:]
        except OSError as error:
            why = str(error.strerror)
        if len(into):
            leased.ends = True
            raise TierFailed(
                f"the cached copy of extent {leased.extent} of {self.catalog.uri} cannot be read: {why}"
            )

    def _make_room(self, keep: int, keep_bytes: int) -> None:
        """Release the least recently read extents that no read needs, down to `keep` of `keep_bytes`."""
        with self._lock:
            count, sizes = len(self._leased), self.catalog.extent_sizes
            held = sum(int(sizes[extent]) for extent in self._leased)
            for leased in self._leased.values():
                if count <= keep and held <= keep_bytes:
                    break
                leased.ends |= not leased.users
                count, held = count - 1, held - int(sizes[leased.extent])
            self._release_ended()

    def _release_ended(self) -> None:
        for leased in list(self._leased.values()):
            self._release_if_ended(leased)

    def _release_if_ended(self, leased: LeasedExtent) -> None:
        """The caller holds the lock, so that the release of an extent precedes its next lease."""
        if leased.ends and not leased.users and leased.fd >= 0:
            os.close(leased.fd)
            leased.fd = -1
            if self._leased.get(leased.extent) is leased:
                del self._leased[leased.extent]
            leased.grants.release([leased.extent])
