"""Request rates of sources that throttle, shared by the processes of one daemon.

A process with a rate of its own would learn of the others from refusals alone, and a source without burst capacity would be
used by half. The rates lie in a memfd that the processes inherit and lock, so no process serves them, and a process that
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

PLACES = 64
"""The most sources of one daemon that share a rate. Further ones have a rate of their own in each process."""
_NAME_BYTES = 16
RATE_POLL_S = 1.0
"""How often a call that waits for its turn in the rate polls how fast the queue moves."""
_STATE = struct.Struct(f"<{_NAME_BYTES}s{len(Pace().numbers())}d")


def new_paces() -> FileIO:
    """Make an empty file for `Paces`; the caller closes it."""
    file = FileIO(os.memfd_create("paces", os.MFD_CLOEXEC), "r+")
    file.truncate(PLACES * _STATE.size)
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
