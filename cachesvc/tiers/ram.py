"""The RAM tier: one sealed memfd for each extent, so that no reader can change another reader's bytes.

The size is sealed at reservation (of an extent that may shrink, at commit), the contents at commit. Readers get duplicates
of one read-only descriptor. They share its file offset and so use mappings or `pread`. The write seal holds even for a
reader that reopens the memfd through /proc. The bytes of a small extent are kept without a memfd, and each reader gets one
of its own: a hundred thousand small files would take more descriptors than a process may have.
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Protocol

from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.model import RAM, ExtentId, TierName
from cachesvc.system.descriptors import closing_fd
from cachesvc.system.huge_pages import SIZE_SEALS
from cachesvc.tiers.tier import CHECKSUM_BLOCK_BYTES, Checksums, tier_error, translated

SMALL_BYTES = CHECKSUM_BLOCK_BYTES
"""Extents up to this size are kept without a descriptor. A grant of one costs 50 us and the size once more."""
_NOEXEC_SEAL = 0x0008  # MFD_NOEXEC_SEAL, Linux 6.3; Python names it from 3.13
_CONTENT_SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


class Holder(Protocol):
    """Keeps sealed copies beyond this process."""

    def hold(self, extent: ExtentId, fd: int, checksums: Checksums) -> None:
        """Keep a copy. The descriptor stays the caller's."""
        ...

    def drop(self, extent: ExtentId) -> None:
        """Give up a copy, if it is kept."""
        ...


class RamTier:
    """Extents as memfds. Evicting closes the tier's descriptor; the memory is freed when the last reader closes its own.

    A reservation allocates no pages: no limit on memfds would answer ENOSPC there (the cgroup kills instead), and zeroing
    64 MiB would hold the daemon's thread for tens of milliseconds. Fills make pages present before they use them, so that
    a lack of memory is an error and no SIGBUS.
    """

    def __init__(self, name: TierName = RAM, most: int | None = None, holder: Holder | None = None) -> None:
        """`most`: the number of descriptors that the limit of open files allows; None for no limit. `holder`: what keeps
        copies beyond this process, until they are evicted; small ones end with it."""
        self.name = name
        self._most = most
        self._holder = holder
        self._filling: dict[ExtentId, int] = {}
        self._committed: dict[ExtentId, tuple[int, Checksums]] = {}
        self._small: dict[ExtentId, tuple[bytes, Checksums]] = {}

    def reserve(self, extent: ExtentId, size_bytes: int, shrinks: bool = False) -> int:
        """Return a read-write descriptor of exactly `size_bytes` zeros, its size sealed; the caller closes it. With
        `shrinks` it is sealed against growth alone.

        Raises `OutOfSpace`, also at `most` extents, and `TierFailed`.
        """
        assert extent not in self._filling, "reserved twice"
        assert not self._has(extent), "reserved again without evicting"
        if self._most is not None and len(self._filling) + len(self._committed) >= self._most:
            raise OutOfSpace(
                f"{self.name} holds {self._most} extents above {SMALL_BYTES >> 10} KiB, as many as the limit of open files"
                " allows; raise it (LimitNOFILE=, ulimit -Hn)"
            )
        with translated(self.name, "reserve memory"):
            own = _memfd(f"cachesvc:{extent.hex()}")
            try:
                os.ftruncate(own, size_bytes)
                fcntl.fcntl(own, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW if shrinks else SIZE_SEALS)
                given = os.dup(own)
            except OSError:
                os.close(own)
                raise
        self._filling[extent] = own
        return given

    def shrink(self, extent: ExtentId, size_bytes: int) -> None:
        """Give the end of a reservation back. Raises `TierFailed`."""
        with translated(self.name, "shrink an extent"):
            os.ftruncate(self._filling[extent], size_bytes)

    def commit(self, extent: ExtentId, checksums: Checksums) -> None:
        """Seal the contents. Raises `TierFailed` while a writable mapping exists, or on a wrong size."""
        self.hold(extent, checksums)
        if self._holder is not None and extent in self._committed:
            self._holder.hold(extent, self._committed[extent][0], checksums)

    def hold(self, extent: ExtentId, checksums: Checksums) -> None:
        """Seal the contents of a copy that ends with this process. Raises as `commit`."""
        own = self._filling[extent]
        if os.fstat(own).st_size != checksums.size_bytes:
            raise TierFailed(
                f"{self.name}: extent {extent.hex()} was reserved with another size than committed"
            )
        with translated(self.name, "seal an extent"):
            fcntl.fcntl(own, fcntl.F_ADD_SEALS, SIZE_SEALS | _CONTENT_SEALS)
            readable = os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC)
        # Added here before it leaves `_filling`, so that `abort` and `open` always find it in one of them.
        self._keep(extent, readable, checksums)
        del self._filling[extent]
        os.close(own)

    def adopt(self, extent: ExtentId, readable: int, checksums: Checksums) -> None:
        """Take over an extent that another daemon sealed, and the descriptor `readable`. Raises `TierFailed` where it can
        change, or has another size."""
        assert not self._has(extent), "adopted twice"
        with translated(self.name, "look at an extent"):
            size_bytes, seals = os.fstat(readable).st_size, fcntl.fcntl(readable, fcntl.F_GET_SEALS)
        if size_bytes != checksums.size_bytes or ~seals & (SIZE_SEALS | _CONTENT_SEALS):
            raise TierFailed(
                f"{self.name}: extent {extent.hex()} is not sealed, or has another size than it should have"
            )
        self._keep(extent, readable, checksums)

    def abort(self, extent: ExtentId) -> None:
        """Forget a reservation; unknown extents are ignored."""
        own = self._filling.pop(extent, None)
        if own is not None:
            os.close(own)

    def open(self, extent: ExtentId) -> tuple[int, Checksums]:
        """Return a read-only descriptor of a committed extent (the caller closes it) and its checksums."""
        small = self._small.get(extent)
        try:
            if small is not None:
                return _sealed(f"cachesvc:{extent.hex()}", small[0]), small[1]
            readable, checksums = self._committed[extent]
            return os.dup(readable), checksums
        except OSError as error:
            raise tier_error(error, self.name, "open an extent") from error

    def evict(self, extent: ExtentId) -> None:
        """Close the tier's descriptor of a committed extent, and the holder's."""
        if self._small.pop(extent, None) is not None:
            return
        readable, _ = self._committed.pop(extent)
        os.close(readable)
        self.give_up(extent)

    def give_up(self, extent: ExtentId) -> None:
        """Have the holder give up an extent that was not adopted."""
        if self._holder is not None:
            self._holder.drop(extent)

    def close(self) -> None:
        """Drop every extent and reservation. Granted descriptors stay valid, and the holder keeps what it has."""
        for extent in list(self._filling):
            self.abort(extent)
        self._small.clear()
        while self._committed:
            os.close(self._committed.popitem()[1][0])

    def _has(self, extent: ExtentId) -> bool:
        return extent in self._committed or extent in self._small

    def _keep(self, extent: ExtentId, readable: int, checksums: Checksums) -> None:
        """Keep a sealed extent: its descriptor `readable`, or its bytes where they are few."""
        if checksums.size_bytes > SMALL_BYTES:
            self._committed[extent] = (readable, checksums)
            return
        with translated(self.name, "read an extent"):
            self._small[extent] = (os.pread(readable, checksums.size_bytes, 0), checksums)
        os.close(readable)


def _sealed(name: str, body: bytes) -> int:
    """Return a read-only descriptor of a new memfd that holds these bytes for good."""
    with closing_fd(_memfd(name)) as own:
        os.pwrite(own, body, 0)
        fcntl.fcntl(own, fcntl.F_ADD_SEALS, SIZE_SEALS | _CONTENT_SEALS)
        return os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC)


def _memfd(name: str) -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create(name, flags | _NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a kernel before 6.3
            raise
        return os.memfd_create(name, flags)
