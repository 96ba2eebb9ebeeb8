"""An NVMe tier: one checksummed file an extent below a directory, and an LMDB index of what is whole.

    DIR/cachesvc-v1/lock           held while a daemon uses the directory
    DIR/cachesvc-v1/index.lmdb     extent -> size and checksums
    DIR/cachesvc-v1/tmp/<id>       being filled; removed at start
    DIR/cachesvc-v1/extents/<id>   whole

A crash at any point leaves a whole committed extent, or garbage that start-up removes.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from cachesvc.core.errors import CacheError, InvalidInput, OutOfSpace, TierFailed
from cachesvc.core.model import ExtentId, TierName
from cachesvc.tiers.index import ResidencyIndex
from cachesvc.tiers.tier import Checksums, Resident

_FULL = {errno.ENOSPC, errno.EDQUOT}


class NvmeTier:
    """Satisfies `Tier` and `Recovering`."""

    def __init__(self, name: TierName, directory: str) -> None:
        """Takes the directory for this process. Raises InvalidInput when another daemon has it, TierFailed
        when it cannot be used."""
        self.name = name
        self._root = f"{directory}/cachesvc-v1"
        try:
            for folder in ("tmp", "extents"):
                Path(self._root, folder).mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = os.open(f"{self._root}/lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._folder = os.open(f"{self._root}/extents", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise TierFailed(f"{directory} cannot hold a cache ({error.strerror}); check --nvme") from None
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._close()
            raise InvalidInput(f"another daemon uses {directory}; give each its own --nvme") from None
        self._index = ResidencyIndex(f"{self._root}/index.lmdb")

    def reserve(self, extent: ExtentId, size_bytes: int) -> int:
        """A temporary file whose blocks are allocated: a disk that is full says so now."""
        path = self._temporary(extent)
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            try:
                if size_bytes:
                    os.posix_fallocate(fd, 0, size_bytes)
            except BaseException:
                os.close(fd)
                raise
        except OSError as error:
            self.abort(extent)
            raise self._typed(error) from None
        return fd

    def commit(self, extent: ExtentId, checksums: Checksums) -> None:
        """Make durable, in an order in which every crash is harmless: a file without a row is garbage, and a
        row is only ever written for a file that is whole."""
        try:
            # 1. The bytes.
            fd = os.open(self._temporary(extent), os.O_RDONLY | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            # 2. The name.
            os.rename(self._temporary(extent), self._path(extent))
            os.fsync(self._folder)
            # 3. The row, synced by LMDB.
            self._index.put(extent, checksums)
        except OSError as error:
            if isinstance(error, CacheError):
                raise
            raise self._typed(error) from None

    def abort(self, extent: ExtentId) -> None:
        """Remove the temporary file."""
        try:
            os.unlink(self._temporary(extent))
        except OSError:
            return  # not there, or a disk in trouble: start-up removes it

    def open(self, extent: ExtentId) -> tuple[int, Checksums | None]:
        """The extent's file, by its final name, or the temporary one before its commit."""
        for path in (self._path(extent), self._temporary(extent), self._path(extent)):
            try:
                return os.open(path, os.O_RDONLY | os.O_CLOEXEC), self._index.get(extent)
            except FileNotFoundError:
                continue  # a commit may rename it between two looks
            except OSError as error:
                raise self._typed(error) from None
        raise TierFailed(f"{self._path(extent)} has disappeared; was the cache directory cleaned by hand?")

    def evict(self, extent: ExtentId) -> None:
        """Forget: first the row, then the file."""
        self._index.delete([extent])
        for path in (self._path(extent), self._temporary(extent)):
            try:
                os.unlink(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise self._typed(error) from None

    def recover(self) -> Iterator[Resident]:
        """Remove what is not whole and tell what is. Sizes are compared; bytes are verified before the first
        grant of each."""
        for entry in os.scandir(f"{self._root}/tmp"):
            os.unlink(entry.path)
        on_disk = {entry.name: entry.stat().st_size for entry in os.scandir(self._folder_path())}
        lost: list[ExtentId] = []
        whole: list[Resident] = []
        for extent, size in self._index.items():
            if on_disk.get(extent.hex()) == size:
                del on_disk[extent.hex()]
                whole.append(Resident(extent, size))
            else:
                lost.append(extent)
        self._index.delete(lost)
        for name in on_disk:
            os.unlink(f"{self._folder_path()}/{name}")
        yield from whole

    def close(self) -> None:
        """Give the directory back."""
        self._index.close()
        self._close()

    def _close(self) -> None:
        os.close(self._lock)
        os.close(self._folder)

    def _folder_path(self) -> str:
        return f"{self._root}/extents"

    def _path(self, extent: ExtentId) -> str:
        return f"{self._root}/extents/{extent.hex()}"

    def _temporary(self, extent: ExtentId) -> str:
        return f"{self._root}/tmp/{extent.hex()}"

    def _typed(self, error: OSError) -> CacheError:
        if error.errno in _FULL:
            return OutOfSpace(f"the disk of {self._root} is full; free space or lower --nvme")
        return TierFailed(f"{self._root}: {error.strerror}; mend the disk")
