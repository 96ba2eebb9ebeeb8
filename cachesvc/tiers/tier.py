"""The Protocol of storage on this node; `RamTier` and `NvmeTier` implement it. Errors of the operating
system become typed ones that say what to do."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from xxhash import xxh3_128_digest

from cachesvc.core.errors import CacheError, OutOfSpace, TierFailed, translating
from cachesvc.core.model import ExtentId, TierName

CHECKSUM_BLOCK_BYTES = 64 << 10
"""Bytes that a verified read of a small sample reads at least. Digests take 1/8192 of the data."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """xxh3-64 of every `CHECKSUM_BLOCK_BYTES` of an extent, as packed little-endian u64 (8 bytes a block)."""

    size_bytes: int
    digests: bytes

    @property
    def content(self) -> bytes:
        """A digest of the extent's bytes, 16 bytes: xxh3-128 of `digests`, seeded by the size. It costs 1 us for 64 MiB."""
        found: bytes = xxh3_128_digest(self.digests, self.size_bytes)
        return found


class Tier(Protocol):
    """Holds extents. The core decides on budgets and evictions; a tier obeys, or raises `OutOfSpace` or `TierFailed`. All
    calls come from one thread, except `commit`, which may run on another.
    """

    name: TierName

    def reserve(self, extent: ExtentId, size_bytes: int, shrinks: bool = False) -> int:
        """Return a new read-write descriptor with room for `size_bytes` from offset 0; the caller closes it. Bytes behind
        these belong to the tier. The extent is not visible yet. `shrinks`: `shrink` may follow."""
        ...

    def shrink(self, extent: ExtentId, size_bytes: int) -> None:
        """Give the bytes of a reservation behind its first `size_bytes` back. Call it before `commit`."""
        ...

    def commit(self, extent: ExtentId, checksums: Checksums) -> None:
        """Make a filled extent permanent: seal it (RAM), or write its footer, fsync and rename the file (NVMe)."""
        ...

    def hold(self, extent: ExtentId, checksums: Checksums) -> None:
        """Keep a filled extent for the life of this daemon alone, in place of `commit`."""
        ...

    def abort(self, extent: ExtentId) -> None:
        """Drop a reservation and free its space. Ignores unknown extents."""
        ...

    def open(self, extent: ExtentId) -> tuple[int, Checksums | None]:
        """Return a read-only descriptor (the caller closes it) and the checksums given at commit.

        An NVMe extent may be opened before its commit, since readers need verified bytes, not durable ones; its checksums
        are None then. RAM extents are opened after commit only."""
        ...

    def evict(self, extent: ExtentId) -> None:
        """Drop a committed extent and free its space. Granted descriptors stay valid."""
        ...

    def close(self) -> None:
        """Release all resources. A `PersistentTier` keeps committed extents on disk."""
        ...


@runtime_checkable
class PersistentTier(Protocol):
    """A tier whose committed extents survive the daemon."""

    def recover(self) -> dict[ExtentId, int]:
        """Remove temporary files and files that are no extents; return every committed extent and its size in bytes."""
        ...


_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})
_REMEDIES = {
    errno.EMFILE: "raise the open-file limit (LimitNOFILE, ulimit -n)",
    errno.ENFILE: "raise fs.file-max",
    errno.EROFS: "the file system is read-only: remount it, or name another directory",
    errno.EIO: "the device reports errors: look into dmesg, replace it or name another directory",
    errno.EFBIG: "raise the file-size limit (ulimit -f), or use smaller extents",
    errno.EACCES: "give the daemon's user access to the directory",
    errno.EPERM: "give the daemon's user access to the directory",
    errno.ENOENT: "a cached file was removed behind the daemon's back; leave the cache directory to it",
    errno.EBUSY: "the extent is still mapped writable by its filler",
}


def tier_error(error: OSError, where: str, doing: str) -> CacheError:
    """Return `OutOfSpace` for a full disk, quota or memory, else `TierFailed`; one line with the remedy.

    `where` names the tier; `doing` completes "cannot ..."."""
    said = f"{where}: cannot {doing}: {error.strerror or error}"
    if error.errno in _FULL:
        return OutOfSpace(f"{said}; free space there, or give the tier a smaller budget")
    remedy = _REMEDIES.get(error.errno or 0)
    return TierFailed(f"{said}; {remedy}" if remedy else said)


def translated(where: str, doing: str) -> translating:
    """Return a context that raises `tier_error` in the place of an OSError of its body."""
    return translating(OSError, lambda error: tier_error(error, where, doing))
