"""The footer of an extent's file, behind its bytes: `digests | magic | id | size u64 | seal u64`.

The seal is xxh3-64 of all that precedes it in the footer, so a damaged footer is recognised. A complete file states its
extent, size and checksums itself, so no index beside the files can be damaged or disagree with them.
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
    """Return the length of the footer of an extent of `size_bytes`."""
    return block_count(size_bytes) * DIGEST_BYTES + _FIXED_BYTES


def encode(extent: ExtentId, checksums: Checksums) -> bytes:
    """Return the footer, which belongs at offset `checksums.size_bytes`."""
    sealed = checksums.digests + _TAIL.pack(MAGIC, extent, checksums.size_bytes)
    return sealed + _SEAL.pack(xxh3_64_intdigest(sealed))


def write(fd: int, extent: ExtentId, checksums: Checksums) -> None:
    """Write the footer behind the bytes. Raises OSError; ENOSPC when the disk takes only a part of it."""
    text = encode(extent, checksums)
    if os.pwrite(fd, text, checksums.size_bytes) != len(text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def is_there(fd: int, size_bytes: int) -> bool:
    """Tell whether a byte other than 0 follows an extent of `size_bytes`. Raises OSError."""
    return any(os.pread(fd, footer_bytes(size_bytes), size_bytes))


def read(fd: int, extent: ExtentId, size_bytes: int) -> Checksums:
    """Return the checksums in a file's footer. Raises `CorruptData` when the file is not exactly this extent, and
    OSError."""
    footer = os.pread(
        fd, footer_bytes(size_bytes) + 1, size_bytes
    )  # one byte more: nothing may follow the footer
    checksums = Checksums(size_bytes, footer[: block_count(size_bytes) * DIGEST_BYTES])
    if footer != encode(extent, checksums):
        raise CorruptData(f"the file of extent {extent.hex()} is damaged at its end; it must be filled again")
    return checksums
