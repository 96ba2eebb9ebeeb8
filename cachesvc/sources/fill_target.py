"""The descriptor that an extent is written to, and the writing of ranges while they arrive."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass

from cachesvc.core.errors import OutOfSpace, TierFailed

PASS_BYTES = 1 << 20
"""A range is written, and passed on to peers, this many bytes at a time while the rest of it arrives. Over a slow link the
ranges of an extent arrive side by side, and all of them end last. A multiple of the blocks that have digests."""
OnBytes = Callable[[int, memoryview], None]


def ignore_bytes(at: int, data: memoryview) -> None:
    """Do nothing; the default of `Fetcher.fetch`."""


@dataclass(frozen=True, slots=True)
class FillTarget:
    """The descriptor that an extent is written to. `passing` sees all bytes once they are written: peers may then be sent
    the blocks that it marks as complete."""

    fd: int
    passing: OnBytes

    def write(self, data: memoryview, at: int) -> None:
        """Write all of `data` at offset `at`. Raises OutOfSpace, TierFailed."""
        begin, whole = at, data
        try:
            while len(data):
                done = os.pwrite(self.fd, data, at)
                data, at = data[done:], at + done
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise OutOfSpace("no space left for the extent; lower the budget") from error
            raise TierFailed(f"cannot write the extent being filled: {error.strerror}") from error
        self.passing(begin, whole)

    def read(self, data: memoryview, at: int) -> None:
        """Fill all of `data` with the bytes written at offset `at`. Raises TierFailed."""
        try:
            while len(data):
                done = os.preadv(self.fd, [data], at)
                if not done:
                    raise TierFailed("the extent being filled ends before what was written to it")
                data, at = data[done:], at + done
        except OSError as error:
            raise TierFailed(f"cannot read the extent being filled: {error.strerror}") from error


class RangeWriter:
    """Writes a range that arrives in `view` to offset `at` of a target, whole steps of `PASS_BYTES` at once."""

    def __init__(self, into: FillTarget, at: int, view: memoryview) -> None:
        self._into, self._at, self._view = into, at, view
        self._written = 0

    def received(self, count: int) -> None:
        """Write what has come of the first `count` bytes; 0 begins the range again. Raises as `FillTarget.write`."""
        if not count:
            self._written = 0
        end = count - (self._at + count) % PASS_BYTES
        if end > self._written:
            self._write(end)

    def finish(self) -> None:
        """Write the rest. Raises as `FillTarget.write`."""
        self._write(len(self._view))

    def _write(self, end: int) -> None:
        self._into.write(self._view[self._written : end], self._at + self._written)
        self._written = end
