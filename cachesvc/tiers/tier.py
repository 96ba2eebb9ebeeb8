"""The seam to where bytes are kept on this node: RAM (sealed memfds) and NVMe (checksummed files)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from cachesvc.core.model import ExtentId, TierName

CHECKSUM_BLOCK_BYTES = 64 << 10
"""What one checked read of a small sample costs at least; digests are an eight-thousandth of the data."""


@dataclass(frozen=True, slots=True)
class Checksums:
    """xxh3-64 of every `CHECKSUM_BLOCK_BYTES` of an extent, as packed little-endian u64 (8 bytes a block)."""

    size_bytes: int
    digests: bytes


class Tier(Protocol):
    """Holds extents. Budgets are decided in the core; a tier only does what it is told, or raises
    `OutOfSpace` / `TierFailed`. All calls come from one thread, except `commit`, which may run on another.
    """

    name: TierName

    def reserve(self, extent: ExtentId, size_bytes: int) -> int:
        """A new read-write descriptor with room for `size_bytes` from 0 (the caller closes it), to be filled;
        what lies behind them is the tier's. Not yet visible."""
        ...

    def commit(self, extent: ExtentId, checksums: Checksums) -> None:
        """Make a filled extent permanent: seal it (RAM), or write its footer, fsync and rename it (NVMe)."""
        ...

    def abort(self, extent: ExtentId) -> None:
        """Forget a reservation and give back its space. Never raises for an unknown extent."""
        ...

    def open(self, extent: ExtentId) -> tuple[int, Checksums | None]:
        """A read-only descriptor (the caller closes it) and the checksums given at commit; None before the
        commit of an NVMe extent, which readers may already have: they wait for verified bytes, not for
        durability. RAM extents are opened after commit only."""
        ...

    def evict(self, extent: ExtentId) -> None:
        """Forget a committed extent and give back its space. Descriptors already granted stay valid."""
        ...

    def close(self) -> None:
        """Give back everything; a tier that survives keeps what is committed."""
        ...


@runtime_checkable
class PersistentTier(Protocol):
    """A tier that survives the daemon."""

    def hold(self, extent: ExtentId, checksums: Checksums) -> None:
        """Instead of `commit`: keep a filled extent for this daemon alone, with its checksums."""
        ...

    def recover(self) -> dict[ExtentId, int]:
        """Every committed extent and its size in bytes, after garbage (temporary files, files that can be no
        extent's) was dropped."""
        ...
