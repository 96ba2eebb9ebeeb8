"""What an extent's file says about itself, behind its bytes: `digests | magic | id | size u64 | seal u64`.

The seal is xxh3-64 of everything before it, so a footer is sound or it is none. A file that is whole names
its extent, its size and its checksums: no index has to be kept beside the files, none can be damaged, and
none can disagree with them.
"""

from __future__ import annotations

import errno
import os
import struct

from xxhash import xxh3_64_intdigest

from cachesvc.core.errors import CorruptData
from cachesvc.core.model import ExtentId
from cachesvc.tiers.checksum import DIGEST_BYTES, block_count
from cachesvc.tiers.tier import Checksums

MAGIC = b"cachsvc1"
_TAIL = struct.Struct("<8s16sQ")
_SEAL = struct.Struct("<Q")
_FIXED_BYTES = _TAIL.size + _SEAL.size


def footer_bytes(size_bytes: int) -> int:
    """Length of the footer of an extent of `size_bytes`."""
    return block_count(size_bytes) * DIGEST_BYTES + _FIXED_BYTES


def encode(extent: ExtentId, checksums: Checksums) -> bytes:
    """The footer, to be written at `checksums.size_bytes`."""
    sealed = checksums.digests + _TAIL.pack(MAGIC, extent, checksums.size_bytes)
    return sealed + _SEAL.pack(xxh3_64_intdigest(sealed))


def write(fd: int, extent: ExtentId, checksums: Checksums) -> None:
    """Put the footer behind the bytes. Raises OSError, also where a disk that runs full takes a part of it."""
    text = encode(extent, checksums)
    if os.pwrite(fd, text, checksums.size_bytes) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_there(fd: int, size_bytes: int) -> bool:
    """Whether anything has been written behind an extent of `size_bytes`. Raises OSError."""
    return any(os.pread(fd, footer_bytes(size_bytes), size_bytes))


def read(fd: int, extent: ExtentId, size_bytes: int) -> Checksums:
    """The checksums that a file keeps of its extent. Raises `CorruptData` when it is not this extent, whole,
    and OSError."""
    found = os.pread(fd, footer_bytes(size_bytes) + 1, size_bytes)  # one byte more: nothing may follow
    checksums = Checksums(size_bytes, found[: block_count(size_bytes) * DIGEST_BYTES])
    if found != encode(extent, checksums):
        raise CorruptData(f"the file of extent {extent.hex()} is damaged at its end; it must be filled again")
    return checksums
