"""The paces at which the sources of one daemon are asked, one for all processes that do: each by itself would learn of
the others only from refusals, and a source that bears no burst would be used by half.

They lie in a memfd that the processes inherit and lock, so nobody serves them, and who dies owes nothing. Clocks are of
one machine.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO

from cachesvc.core.rates.backoff import Pace

PLACES = 64
"""Sources of one daemon; what asks more has a pace of its own in each process."""
_NAME_BYTES = 16
_STATE = struct.Struct(f"<{_NAME_BYTES}s{len(Pace().numbers())}d")


def new_paces() -> FileIO:
    """A file for `Paces`, without any yet; the caller closes it."""
    file = FileIO(os.memfd_create("paces", os.MFD_CLOEXEC), "r+")
    file.truncate(PLACES * _STATE.size)
    return file


class SharedPace:
    """One `Pace`, of all processes that hold the same part of the same file; in no file, of this process alone."""

    def __init__(self, file: int = -1, offset: int = 0) -> None:
        self._file, self._offset = file, offset
        self._lock = threading.Lock()
        self._own = Pace()

    @contextmanager
    def held(self) -> Iterator[Pace]:
        """The pace, which nobody else sees or changes meanwhile."""
        with self._lock:
            if self._file < 0:
                yield self._own
                return
            with _locked(self._file, self._offset, _STATE.size):
                name, *numbers = _STATE.unpack(os.pread(self._file, _STATE.size, self._offset))
                pace = Pace(*numbers)
                yield pace
                os.pwrite(self._file, _STATE.pack(name, *pace.numbers()), self._offset)


class Paces:
    """Those in a file of `new_paces`; without one, this process's own. Locks belong to a process: one of these in each."""

    def __init__(self, file: int = -1) -> None:
        self._file = file

    def __call__(self, source: str) -> SharedPace:
        """That of a source, which all processes name alike."""
        if self._file < 0:
            return SharedPace()
        wanted = hashlib.blake2b(source.encode(), digest_size=_NAME_BYTES).digest()
        with _locked(self._file, 0, PLACES * _STATE.size):
            for offset in range(0, PLACES * _STATE.size, _STATE.size):
                name = os.pread(self._file, _NAME_BYTES, offset)
                if name == wanted:
                    return SharedPace(self._file, offset)
                if not any(name):
                    os.pwrite(self._file, _STATE.pack(wanted, *Pace().numbers()), offset)
                    return SharedPace(self._file, offset)
        return SharedPace()


@contextmanager
def _locked(file: int, offset: int, size: int) -> Iterator[None]:
    fcntl.lockf(file, fcntl.LOCK_EX, size, offset)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN, size, offset)
