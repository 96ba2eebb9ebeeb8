"""The RAM tier: one sealed memfd an extent.

A filled memfd is sealed against writing, shrinking, growing and unsealing, and then granted as a descriptor
that was opened anew, read-only: no reader can change another's data, and the memory lives until its last user
has closed it, whatever becomes of the daemon.
"""

from __future__ import annotations

import fcntl
import os

from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.model import RAM, ExtentId
from cachesvc.tiers.tier import Checksums

_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_NOEXEC_SEAL = 0x0008
"""MFD_NOEXEC_SEAL, Linux 6.3: older kernels refuse the flag."""


class RamTier:
    """Satisfies `Tier`."""

    name = RAM

    def __init__(self) -> None:
        self._filling: dict[ExtentId, int] = {}
        self._filled: dict[ExtentId, tuple[int, Checksums]] = {}

    def reserve(self, extent: ExtentId, size_bytes: int) -> int:
        """A memfd of that size; its pages are taken as they are written."""
        try:
            memory = _memfd(f"cachesvc-{extent.hex()[:8]}")
        except OSError as error:
            raise OutOfSpace(
                f"no memory for an extent ({error.strerror}); raise ulimit -n or lower --ram"
            ) from None
        try:
            os.ftruncate(memory, size_bytes)
            copy = os.dup(memory)
        except OSError as error:
            os.close(memory)
            raise OutOfSpace(f"no memory for an extent of {size_bytes:,} bytes ({error.strerror})") from None
        self._filling[extent] = memory
        return copy

    def commit(self, extent: ExtentId, checksums: Checksums) -> None:
        """Seal. Raises TierFailed while somebody still maps it writable."""
        memory = self._filling.pop(extent)
        try:
            fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(memory)
            raise TierFailed(
                f"an extent cannot be sealed ({error.strerror}): it is still mapped writable"
            ) from None
        self._filled[extent] = (memory, checksums)

    def abort(self, extent: ExtentId) -> None:
        """Forget a reservation."""
        memory = self._filling.pop(extent, None)
        if memory is not None:
            os.close(memory)

    def open(self, extent: ExtentId) -> tuple[int, Checksums | None]:
        """A descriptor that can only read, even by name through /proc by another user."""
        memory, checksums = self._filled[extent]
        try:
            return os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC), checksums
        except OSError as error:
            raise TierFailed(
                f"an extent in memory cannot be opened ({error.strerror}); raise ulimit -n"
            ) from None

    def evict(self, extent: ExtentId) -> None:
        """Close; the memory is free when no reader maps it any more."""
        memory, _ = self._filled.pop(extent)
        os.close(memory)


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError:
        return os.memfd_create(name, flags)
