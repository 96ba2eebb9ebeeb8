"""The progress of one fill in shared memory: which blocks of 64 KiB are complete, and their digests.

The daemon makes it, the filler writes it, and the process that serves peers reads it, so that peers are sent the blocks
of an extent while it is filled. The memory holds, in this order: the state, the digest of digests, the maker, one byte for
each block, and the digests of all blocks.

A filler that dies changes nothing here. The daemon calls `abort` for it, and readers have timeouts of their own.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from enum import IntEnum

from xxhash import xxh3_128_digest

from cachesvc.system.descriptors import closing_fd
from cachesvc.tiers.checksum import DIGEST_BYTES, block_count

ROOT_BYTES = 16
"""The size of a digest of digests."""
_STATE, _ROOT, _MAKER, _FLAGS = 0, 16, 32, 64
_MAKER_BYTES = 8
_SIZE_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_MISSING, _COMPLETE = b"\0", b"\1"


class FillState(IntEnum):
    """A fill goes from FILLING to one of the others, where it stays."""

    FILLING = 0
    DONE = 1
    ABORTED = 2


def digest_of_digests(digests: bytes) -> bytes:
    """Return the xxh3-128 of an extent's digests, 16 bytes: it names the contents of the whole extent."""
    root: bytes = xxh3_128_digest(digests)
    return root


class FillProgress:
    """Maps the progress of one fill. Safe from any thread; any number of processes may read, one writes.

    The order of events that a reader relies on:
      1. the bytes of a block are in the extent's file
      2. its digest is in this memory
      3. its flag is set
      4. the digest of digests is there
      5. the state is DONE
    A release and an acquisition of one lock lie between two of them on both sides, so processors that reorder stores or
    loads keep the order as well.
    """

    @staticmethod
    def create(size_bytes: int) -> int:
        """Return the descriptor of the progress of a new fill of `size_bytes`; the caller closes it. Raises OSError."""
        fd = os.memfd_create("cachesvc:progress", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _memory_bytes(size_bytes))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SIZE_SEALS)
        except OSError:
            os.close(fd)
            raise
        return fd

    def __init__(self, fd: int, size_bytes: int) -> None:
        """Map a descriptor of `create`, which the caller keeps; a reader's may be read-only. `size_bytes` is the size of
        the extent. Raises OSError, and ValueError for memory of another size."""
        self.size_bytes = size_bytes
        self.blocks = block_count(size_bytes)
        if os.fstat(fd).st_size != _memory_bytes(size_bytes):
            raise ValueError(f"this is not the progress of {size_bytes:,} bytes")
        readable = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        access = mmap.ACCESS_READ if readable else mmap.ACCESS_WRITE
        self._memory = mmap.mmap(fd, _memory_bytes(size_bytes), access=access)
        self._digests = _FLAGS + self.blocks
        self._lock = threading.Lock()

    def add(self, first: int, digests: bytes) -> None:
        """Mark consecutive blocks from the index `first` as complete, after their bytes were written.

        Blocks may complete in any order and more than once. A block that completes with another digest than before aborts
        the fill for its readers, which may have the old bytes.
        """
        count = len(digests) // DIGEST_BYTES
        assert 0 <= first <= first + count <= self.blocks, "no blocks of this extent"
        flags, at = _FLAGS + first, self._digests + first * DIGEST_BYTES
        with self._lock:
            again = self._memory.find(_COMPLETE, flags, flags + count) >= 0
            if again and self._changed(first, digests):
                self._end(FillState.ABORTED)
            self._memory[at : at + len(digests)] = digests
        with self._lock:
            self._memory[flags : flags + count] = _COMPLETE * count

    def _changed(self, first: int, digests: bytes) -> bool:
        for index in range(len(digests) // DIGEST_BYTES):
            new = digests[index * DIGEST_BYTES :][:DIGEST_BYTES]
            if self._memory[_FLAGS + first + index] and new != self._read(first + index, 1):
                return True
        return False

    def complete(self, first: int) -> int:
        """Return the number of consecutive complete blocks from the index `first`."""
        return self._until(_MISSING, first, self.blocks) - first

    def runs(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the complete blocks among `count` from the index `first`, as (first, count) of consecutive ones."""
        return self._runs(_COMPLETE, first, first + count, count)

    def missing(self, limit: int) -> list[tuple[int, int]]:
        """Return the missing blocks as (first, count) of consecutive ones, `limit` pairs at most."""
        return self._runs(_MISSING, 0, self.blocks, limit)

    def _runs(self, wanted: bytes, at: int, end: int, limit: int) -> list[tuple[int, int]]:
        other = _MISSING if wanted == _COMPLETE else _COMPLETE
        runs: list[tuple[int, int]] = []
        while len(runs) < limit and (at := self._until(wanted, at, end)) < end:
            stop = self._until(other, at, end)
            runs.append((at, stop - at))
            at = stop
        return runs

    def _until(self, flag: bytes, at: int, end: int) -> int:
        with self._lock:
            place = self._memory.find(flag, _FLAGS + at, _FLAGS + end)
        return end if place < 0 else place - _FLAGS

    def digests(self, first: int, count: int) -> bytes:
        """Return the digests of `count` blocks from the index `first`, as many as are complete."""
        with self._lock:
            return self._read(first, count)

    def _read(self, first: int, count: int) -> bytes:
        at = self._digests + first * DIGEST_BYTES
        return self._memory[at : at + count * DIGEST_BYTES]

    def finish(self) -> bool:
        """Enter DONE once all blocks are complete; call it after the extent was committed. Return False, and change
        nothing, for a fill that was aborted."""
        assert self.complete(0) == self.blocks, "blocks are missing"
        with self._lock:
            self._memory[_ROOT : _ROOT + ROOT_BYTES] = digest_of_digests(self._read(0, self.blocks))
        with self._lock:
            return self._end(FillState.DONE)

    def abort(self) -> bool:
        """Enter ABORTED. Return False, and change nothing, for a fill that is done."""
        with self._lock:
            return self._end(FillState.ABORTED)

    def _end(self, state: FillState) -> bool:
        if self._memory[_STATE] == FillState.FILLING:
            self._memory[_STATE] = state
        return self._memory[_STATE] == state

    @property
    def state(self) -> FillState:
        """The state of the fill. A reader that reads it before the flags finds all blocks complete when it is DONE."""
        with self._lock:
            return FillState(self._memory[_STATE])

    @property
    def root(self) -> bytes:
        """The digest of digests of a fill that is DONE."""
        with self._lock:
            return self._memory[_ROOT : _ROOT + ROOT_BYTES]

    @property
    def maker(self) -> int:
        """The node that fetched the bytes from the source (`core/placement/comparisons.py`); 0 for the one that has this
        fill, or that sent the bytes. Set before the fill is DONE."""
        with self._lock:
            return int.from_bytes(self._memory[_MAKER : _MAKER + _MAKER_BYTES], "little")

    @maker.setter
    def maker(self, maker: int) -> None:
        with self._lock:
            self._memory[_MAKER : _MAKER + _MAKER_BYTES] = maker.to_bytes(_MAKER_BYTES, "little")

    def close(self) -> None:
        """Unmap the memory."""
        self._memory.close()


@contextmanager
def own_progress(size_bytes: int) -> Iterator[FillProgress]:
    """The progress of a fill that no other process follows. Raises OSError."""
    with closing_fd(FillProgress.create(size_bytes)) as fd, closing(FillProgress(fd, size_bytes)) as progress:
        yield progress


def _memory_bytes(size_bytes: int) -> int:
    return _FLAGS + block_count(size_bytes) * (1 + DIGEST_BYTES)
