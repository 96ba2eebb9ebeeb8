"""Request rates of sources that throttle, and the budget of hedges, shared by the processes of one daemon.

A process with a rate of its own would learn of the others from refusals alone, and a source without burst capacity would be
used by half. They lie in a memfd that the processes inherit and lock, so no process serves them, and a process that
dies holds no lock. All processes read the same machine's clock.
"""

from __future__ import annotations

import fcntl
import hashlib
import math
import os
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO

from cachesvc.core.rates.backoff import Pace
from cachesvc.core.rates.hedge_budget import HEDGE_SHARE, MAX_CLAIMS, HedgeBudget

PLACES = 64
"""The most sources of one daemon that share a rate. Further ones have a rate of their own in each process."""
_NAME_BYTES = 16
RATE_POLL_S = 1.0
"""How often a call that waits for its turn in the rate polls how fast the queue moves."""
_STATE = struct.Struct(f"<{_NAME_BYTES}s{len(Pace().numbers())}d")
_HEDGES_AT, _HEDGES, _CLAIM = PLACES * _STATE.size, struct.Struct("<dq"), struct.Struct("<qdd")
_HEDGES_BYTES = _HEDGES.size + MAX_CLAIMS * _CLAIM.size
_EARNED_BYTES = 1 << 20
"""So many received bytes are added to the shared budget at once."""


def new_paces() -> FileIO:
    """Make an empty file for `Paces`; the caller closes it."""
    file = FileIO(os.memfd_create("paces", os.MFD_CLOEXEC), "r+")
    file.truncate(_HEDGES_AT + _HEDGES_BYTES)
    return file


class SharedPace:
    """One `Pace`, shared by the processes that have the same place of the same file; without a file, this process's own."""

    def __init__(self, file: int = -1, offset: int = 0, most: float = math.inf) -> None:
        """`most`: the limit of the rate, which processes that share the place must give alike."""
        self._file, self._offset = file, offset
        self._lock = threading.Lock()
        self._own = Pace()
        with self.held() as pace:
            pace.most = most

    @contextmanager
    def held(self) -> Iterator[Pace]:
        """Lend the pace to the body of a `with`, locked against other threads and processes."""
        with self._lock:
            if self._file < 0:
                yield self._own
                return
            with _locked(self._file, self._offset, _STATE.size):
                name, *numbers = _STATE.unpack(os.pread(self._file, _STATE.size, self._offset))
                pace = Pace(*numbers)
                yield pace
                os.pwrite(self._file, _STATE.pack(name, *pace.numbers()), self._offset)

    def take(self, places: int, clock: Callable[[], float], sleep: Callable[[float], None]) -> float:
        """Wait until the first of so many places is due. Return the seconds that it took."""
        place, joined_at = None, clock()
        while True:
            with self.held() as pace:
                now = clock()
                if place is None:
                    place = pace.join(now, places)
                wait_s = pace.wait_s(place, now)
            if not wait_s:
                return now - joined_at
            sleep(min(wait_s, RATE_POLL_S))


class SharedHedges:
    """The `HedgeBudget` of the processes that have the same file; without a file, this process's own. Thread-safe."""

    def __init__(self, share: float = HEDGE_SHARE, file: int = -1) -> None:
        """`share`: the bytes that may be asked for twice, as a part of those that sources send; 0: none."""
        self.share, self._file = share, file
        self._lock, self._process = threading.Lock(), os.getpid()
        self._own = HedgeBudget()
        self._unsaid_bytes = 0

    def earn(self, received_bytes: int) -> None:
        """Count bytes that a source sent."""
        with self._lock:
            self._unsaid_bytes += received_bytes
            say = self._unsaid_bytes >= _EARNED_BYTES
        if say:
            self.spend(0)  # adds what was received to the budget

    def fits(self, size_bytes: int) -> bool:
        """Return whether so many bytes are left."""
        if not self.share:
            return False
        with self._held() as budget:
            return budget.fits(size_bytes)

    def spend(self, size_bytes: int) -> None:
        """Take bytes out of the budget; negative: put them back."""
        if self.share:
            with self._held() as budget:
                budget.spend(size_bytes)

    def take(self, rank: float, size_bytes: int, now: float) -> bool:
        """Take the bytes for a read. See `HedgeBudget.take`."""
        if not self.share:
            return False
        with self._held() as budget:
            return budget.take(self._process, rank, size_bytes, now)

    @contextmanager
    def _held(self) -> Iterator[HedgeBudget]:
        with self._lock:
            received_bytes, self._unsaid_bytes = self._unsaid_bytes, 0
            if self._file < 0:
                self._own.earn(received_bytes, self.share)
                yield self._own
                return
            with _locked(self._file, _HEDGES_AT, _HEDGES_BYTES):
                raw = os.pread(self._file, _HEDGES_BYTES, _HEDGES_AT)
                left_bytes, count = _HEDGES.unpack_from(raw)
                claims = _CLAIM.iter_unpack(raw[_HEDGES.size : _HEDGES.size + count * _CLAIM.size])
                budget = HedgeBudget(left_bytes, {process: (rank, until) for process, rank, until in claims})
                budget.earn(received_bytes, self.share)
                yield budget
                rows = [_CLAIM.pack(process, *claim) for process, claim in budget.claims.items()]
                raw = _HEDGES.pack(budget.left_bytes, len(rows)) + b"".join(rows)
                os.pwrite(self._file, raw, _HEDGES_AT)


class Paces:
    """The paces in a file of `new_paces`; without one, paces of this process. POSIX locks belong to a process, so each
    process must have only one of these."""

    def __init__(self, file: int = -1) -> None:
        self._file = file

    def __call__(self, source: str, most: float = math.inf) -> SharedPace:
        """Return the pace of a source, which all processes must name alike, with a rate of `most` at most."""
        if self._file < 0 or (offset := self._offset_of(source)) is None:
            return SharedPace(most=most)
        return SharedPace(self._file, offset, most)

    def hedges(self, share: float) -> SharedHedges:
        """Return the budget of hedges. Call this once."""
        return SharedHedges(share, self._file)

    def _offset_of(self, source: str) -> int | None:
        """Return the place of a source, which is taken at first; None where all are taken."""
        wanted = hashlib.blake2b(source.encode(), digest_size=_NAME_BYTES).digest()
        with _locked(self._file, 0, PLACES * _STATE.size):
            for offset in range(0, PLACES * _STATE.size, _STATE.size):
                name = os.pread(self._file, _NAME_BYTES, offset)
                if name == wanted:
                    return offset
                if not any(name):
                    os.pwrite(self._file, _STATE.pack(wanted, *Pace().numbers()), offset)
                    return offset
        return None


@contextmanager
def _locked(file: int, offset: int, size: int) -> Iterator[None]:
    fcntl.lockf(file, fcntl.LOCK_EX, size, offset)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, size, offset)
