"""Checksums of extents: xxh3-64 of every 64 KiB, computed while filling and checked before bytes are trusted.

A fill computes them while it writes the extent (`StreamedChecksums`). Stored blocks are read by `preadv` into one buffer
that stays in the processor's cache. `preadv` releases the interpreter lock and raises on a disk error; a page fault on a
mapping would hold the lock and become SIGBUS.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Protocol

from xxhash import xxh3_64_digest

from cachesvc.core.errors import CorruptData
from cachesvc.system.fill_target import CACHED_BYTES, FillTarget
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES, Checksums, translated

DIGEST_BYTES = 8


def block_digest(block: bytes | bytearray | memoryview) -> bytes:
    """Return the digest of one block, 8 little-endian bytes. An extent's digests are those of its blocks, concatenated."""
    digest: bytes = xxh3_64_digest(block)
    return digest[::-1]  # the library's digest is big-endian


def block_count(size_bytes: int) -> int:
    """Return the number of blocks of an extent; the last may be short."""
    return -(-size_bytes // CHECKSUM_BLOCK_BYTES)


class Progress(Protocol):
    """Is told of blocks as they complete."""

    def add(self, first: int, digests: bytes) -> None:
        """Note the digests of consecutive blocks, of which `first` is the first."""
        ...


class StreamedChecksums:
    """Digests an extent while it is written, in any order, and marks each digested block in `progress`. Thread-safe."""

    def __init__(self, size_bytes: int, progress: Progress | None = None) -> None:
        self._size_bytes = size_bytes
        self._progress = progress
        self._digests: dict[int, bytes] = {}

    def add(self, at: int, data: memoryview) -> None:
        """Digest the whole blocks within `data`, the extent's bytes from `at`, which are written already. `checksums` reads
        the other blocks back."""
        end = at + len(data)
        digests: list[bytes] = []
        for partial in (at, end):
            if partial % CHECKSUM_BLOCK_BYTES:  # its digest may be of bytes that came in an earlier try
                self._digests.pop(partial // CHECKSUM_BLOCK_BYTES, None)
        for index in range(block_count(at), block_count(end)):
            start = index * CHECKSUM_BLOCK_BYTES
            stop = min(start + CHECKSUM_BLOCK_BYTES, self._size_bytes)
            if stop <= end:
                digest = self._digests[index] = block_digest(data[start - at : stop - at])
                digests.append(digest)
        if self._progress is not None and digests:
            self._progress.add(block_count(at), b"".join(digests))

    def checksums(self, fd: int) -> Checksums:
        """Return the checksums of the whole extent. Reads back from `fd` the blocks that no `add` held whole.

        Raises `CorruptData` when the file is shorter, `TierFailed` when it cannot be read.
        """
        wanted = range(block_count(self._size_bytes))
        back: dict[int, bytes] = {}
        for index, digest in _digests(fd, self._size_bytes, [i for i in wanted if i not in self._digests]):
            back[index] = digest
            if self._progress is not None:
                self._progress.add(index, digest)
        return Checksums(self._size_bytes, b"".join(self._digests.get(i) or back[i] for i in wanted))


def checksums_of(fd: int, offset: int, size_bytes: int) -> Checksums:
    """Read `size_bytes` of a file from `offset`, and return their checksums. Raises `CorruptData` when the file is shorter,
    `TierFailed` when it cannot be read."""
    blocks = _digests(fd, size_bytes, range(block_count(size_bytes)), offset)
    return Checksums(size_bytes, b"".join(digest for _, digest in blocks))


def verify(fd: int, checksums: Checksums) -> None:
    """Read an extent and compare every block. Raises `CorruptData` naming the first block that differs, `TierFailed` when
    the file cannot be read."""
    _check_count(checksums)
    for index, digest in _digests(fd, checksums.size_bytes, range(block_count(checksums.size_bytes))):
        _compare(index, digest, checksums)


def copy_verified(origin: int, into: FillTarget, checksums: Checksums) -> None:
    """Copy an extent, and compare every block while it is in the processor's cache. Raises as `verify`, and OutOfSpace."""
    _check_count(checksums)
    for at in range(0, checksums.size_bytes, CACHED_BYTES):
        size_bytes = min(CACHED_BYTES, checksums.size_bytes - at)
        with into.room(at, size_bytes) as room:
            _read_fully(origin, room, at)
            for begin in range(0, size_bytes, CHECKSUM_BLOCK_BYTES):
                digest = block_digest(room[begin : begin + CHECKSUM_BLOCK_BYTES])
                _compare((at + begin) // CHECKSUM_BLOCK_BYTES, digest, checksums)
            into.store(room, at)


def _check_count(checksums: Checksums) -> None:
    count = len(checksums.digests)
    if count != block_count(checksums.size_bytes) * DIGEST_BYTES:
        raise CorruptData(f"{count} bytes of digests do not fit {checksums.size_bytes} bytes of data")


def _compare(index: int, digest: bytes, checksums: Checksums) -> None:
    if digest != checksums.digests[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]:
        raise CorruptData(
            f"block {index} (bytes from {index * CHECKSUM_BLOCK_BYTES}) does not match its checksum; "
            "the copy must be dropped and filled again"
        )


def _digests(fd: int, size_bytes: int, wanted: Iterable[int], begin: int = 0) -> Iterator[tuple[int, bytes]]:
    buffer = memoryview(bytearray(min(size_bytes, CHECKSUM_BLOCK_BYTES)))
    for index in wanted:
        offset = index * CHECKSUM_BLOCK_BYTES
        block = buffer[: min(CHECKSUM_BLOCK_BYTES, size_bytes - offset)]
        _read_fully(fd, block, begin + offset)
        yield index, block_digest(block)


def _read_fully(fd: int, into: memoryview, offset: int) -> None:
    done = 0
    while done < len(into):
        with translated("tier", "read an extent"):
            count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise CorruptData(
                f"the file ends at byte {offset + done}; the copy must be dropped and filled again"
            )
        done += count
