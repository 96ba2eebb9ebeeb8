"""Checksums of extents: xxh3-64 a MiB, computed and compared without the interpreter lock."""

from __future__ import annotations

import os
import struct

import xxhash

from cachesvc.core.errors import CorruptData
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES, Checksums

_DIGEST = struct.Struct("<Q")


def checksums_of(fd: int, size_bytes: int) -> Checksums:
    """Read `size_bytes` of a descriptor and sum them up. Raises CorruptData when it ends before."""
    block = memoryview(bytearray(min(CHECKSUM_BLOCK_BYTES, max(1, size_bytes))))
    digests = bytearray()
    for start in range(0, size_bytes, CHECKSUM_BLOCK_BYTES):
        wanted = min(CHECKSUM_BLOCK_BYTES, size_bytes - start)
        if os.preadv(fd, [block[:wanted]], start) != wanted:
            raise CorruptData(f"an extent of {size_bytes:,} bytes ends before byte {start + wanted:,}")
        digests += _DIGEST.pack(xxhash.xxh3_64_intdigest(block[:wanted]))
    return Checksums(size_bytes, bytes(digests))


def verify(fd: int, expected: Checksums) -> None:
    """Raise CorruptData, naming the first block that differs, unless the bytes are those summed up before."""
    found = checksums_of(fd, expected.size_bytes)
    if found.digests == expected.digests:
        return
    rows = zip(_DIGEST.iter_unpack(found.digests), _DIGEST.iter_unpack(expected.digests))
    bad = next((n for n, (have, want) in enumerate(rows) if have != want), -1)
    raise CorruptData(f"block {bad} of a cached extent does not match its checksum")
