"""Members from a file that is read again when it changes."""

from __future__ import annotations

import os
import threading

from cachesvc.cluster.addresses import join_address, split_address
from cachesvc.cluster.membership import Endpoint
from cachesvc.cluster.polled import LastList
from cachesvc.core.errors import InvalidInput

POLL_S = 0.5
MAX_BYTES = 1 << 20
"""The largest file: 4,096 lines of 253 bytes."""
_Stamp = tuple[int, int, int]


class MemberFile:
    """The file of `file:///PATH`, one HOST:PORT a line; `#` begins a comment.

    A file that is written in place may be seen half written. A changed file is read once it has kept its size, time and
    inode for one poll, and an invalid file is no list.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self._seen: _Stamp | None = None
        self._read: _Stamp | None = None

    def ask(self, last: LastList, closed: threading.Event) -> float:
        try:
            self._look(last)
        except (OSError, ValueError) as error:  # InvalidInput and UnicodeDecodeError are ValueErrors
            self._read = None
            last.failed(str(error))
        return POLL_S

    def _look(self, last: LastList) -> None:
        stamp = _stamp(self._path)
        settled = self._seen in (None, stamp)
        self._seen = stamp
        if settled and stamp != self._read:
            last.found(_members(self._path))
            self._read = stamp


def _stamp(path: str) -> _Stamp:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_size, found.st_ino


def _members(path: str) -> frozenset[Endpoint]:
    with open(path, "rb") as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise InvalidInput(f"{path} has more than {MAX_BYTES:,} bytes")
    lines = (line.partition("#")[0].strip() for line in data.decode().splitlines())
    return frozenset(Endpoint(join_address(*split_address(line))) for line in lines if line)
