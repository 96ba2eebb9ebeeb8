"""The residency index of an NVMe directory: which extents are committed, with size and checksums, in LMDB.

A row is `size u64 | seal u64 | digests`, the seal being xxh3-64 of key, size and digests. An index that
cannot be read is set aside: what is lost is a cache, never data. Writes may come from any thread, one at a
time; reads never wait for a write to reach the disk.
"""

from __future__ import annotations

import logging
import os
import shutil
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import lmdb
from xxhash import xxh3_64_intdigest

from cachesvc.core.errors import OutOfSpace, TierFailed
from cachesvc.core.model import ExtentId
from cachesvc.tiers.failures import translated
from cachesvc.tiers.tier import Checksums

VERSION = b"1"
MAP_BYTES = 64 << 20  # 100,000 extents of 64 MiB; doubled when full
_LOCK_BYTES = 16 << 10  # 126 readers of 64 bytes and a head
_VERSION_KEY = b"version"  # 7 bytes: no extent id has that length
_HEAD = struct.Struct("<QQ")
_UNREADABLE = (
    lmdb.CorruptedError,
    lmdb.InvalidError,
    lmdb.VersionMismatchError,
    lmdb.PageNotFoundError,
    lmdb.PanicError,
    lmdb.IncompatibleError,
)
_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


class ResidencyIndex:
    """Rows of committed extents. Built by `open_index`."""

    def __init__(self, environment: Any, directory: Path) -> None:
        self._environment = environment
        self._directory = directory
        self._writing = threading.Lock()
        self._mapping = threading.Lock()  # held by readers and by growth, never across a disk write
        self._noting = threading.Lock()
        self._forgotten: set[ExtentId] = set()

    def get(self, extent: ExtentId) -> Checksums | None:
        """The checksums given at commit; None for an unknown extent or a damaged row."""
        with self._mapping, _reported(self._directory), self._environment.begin() as reading:
            return _decode(extent, reading.get(extent))

    def put(self, extent: ExtentId, checksums: Checksums) -> None:
        """Add a row, durable on return, in one transaction with the deletions noted by `forget`."""
        with self._writing:
            with self._noting:
                gone, self._forgotten = self._forgotten, set()
            # Should this fail, the rows in `gone` stay without files: recovery drops them.
            self._write(gone, [(extent, _encode(extent, checksums))])

    def forget(self, extent: ExtentId) -> None:
        """Note a deletion, to be written with the next row: an eviction then never waits for the disk.

        Until then the row has no file, which recovery drops.
        """
        with self._noting:
            self._forgotten.add(extent)

    def delete(self, extents: Iterable[ExtentId]) -> None:
        """Remove rows in one transaction, durable on return."""
        with self._writing:
            self._write(extents, [])

    def items(self) -> Iterator[tuple[ExtentId, Checksums]]:
        """Every sound row."""
        with self._mapping, _reported(self._directory), self._environment.begin() as reading:
            for key, row in reading.cursor():
                checksums = _decode(key, row)
                if checksums is not None:
                    yield ExtentId(key), checksums

    def close(self) -> None:
        """Write what was only noted, and close."""
        try:
            self.delete(self._forgotten)
        finally:
            self._environment.close()

    def _write(self, gone: Iterable[ExtentId], rows: list[tuple[bytes, bytes]]) -> None:
        def run() -> None:
            with self._environment.begin(write=True) as writing:
                for extent in gone:
                    writing.delete(extent)
                for key, row in rows:
                    writing.put(key, row)

        with _reported(self._directory):
            self._growing(run)

    def _growing(self, run: Callable[[], _Answer]) -> _Answer:
        while True:
            try:
                return run()
            except lmdb.MapFullError:
                with self._mapping:  # the map moves: no reader may be inside
                    self._environment.set_mapsize(2 * self._environment.info()["map_size"])


def open_index(directory: Path, map_bytes: int = MAP_BYTES) -> ResidencyIndex:
    """Open or create the index in `directory`; one that is corrupt or of another version is set aside as
    `<directory>.aside` with one log line. Raises `OutOfSpace`, `TierFailed`."""
    with translated(str(directory), "open the index"), _reported(directory):
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            return ResidencyIndex(_environment(directory, map_bytes), directory)
        except _UNREADABLE as error:
            aside = directory.with_name(directory.name + ".aside")
            _log.warning("the index of %s is unreadable (%s): starting empty", directory.parent, error)
            shutil.rmtree(aside, ignore_errors=True)
            os.replace(directory, aside)
            directory.mkdir(mode=0o700)
            return ResidencyIndex(_environment(directory, map_bytes), directory)


def _environment(directory: Path, map_bytes: int) -> Any:
    _allocate_lock(directory / "lock.mdb")
    # metasync off: one flush a commit instead of two. A power cut may undo the last transaction, no more,
    # and a file without its row is dropped at start.
    environment = lmdb.open(str(directory), map_size=map_bytes, metasync=False, max_spare_txns=4, mode=0o600)
    try:
        _check(environment, directory)
        return environment
    except (lmdb.Error, OSError):
        environment.close()
        raise


def _allocate_lock(path: Path) -> None:
    """LMDB writes its reader table through a mapping: on a full disk a sparse one would be a SIGBUS."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, _LOCK_BYTES)
    finally:
        os.close(fd)


def _check(environment: Any, directory: Path) -> None:
    """Raise an error of `_UNREADABLE` unless the whole tree can be walked and the version is ours."""
    needed_bytes = (environment.info()["last_pgno"] + 1) * environment.stat()["psize"]
    if (directory / "data.mdb").stat().st_size < needed_bytes:
        raise lmdb.CorruptedError("shorter than its own page count")  # walking it would be a SIGBUS
    with environment.begin() as reading:
        version = reading.get(_VERSION_KEY)
        entries = sum(1 for _ in reading.cursor().iternext(keys=True, values=False))
        if entries != reading.stat()["entries"]:
            raise lmdb.CorruptedError("rows are missing")
    if entries and version != VERSION:
        raise lmdb.VersionMismatchError(f"version {version!r}, not {VERSION!r}")
    if not entries:
        with environment.begin(write=True) as writing:
            writing.put(_VERSION_KEY, VERSION)


@contextmanager
def _reported(directory: Path) -> Iterator[None]:
    """LMDB's own errors as the tier's; those that ask for setting aside or growth pass."""
    try:
        yield
    except (*_UNREADABLE, lmdb.MapFullError) as error:
        raise TierFailed(
            f"{directory}: the index is damaged ({error}); stop the daemon and remove that directory"
        ) from error
    except (lmdb.DiskError, lmdb.MemoryError) as error:
        raise OutOfSpace(f"{directory}: no space for the index ({error}); free some there") from error
    except lmdb.Error as error:
        raise TierFailed(f"{directory}: the index cannot be used ({error}); look into dmesg") from error


def _encode(extent: ExtentId, checksums: Checksums) -> bytes:
    return _HEAD.pack(checksums.size_bytes, _seal(extent, checksums)) + checksums.digests


def _decode(key: bytes, row: bytes | None) -> Checksums | None:
    if row is None or len(row) < _HEAD.size or len(key) != 16:
        return None
    size_bytes, seal = _HEAD.unpack_from(row)
    checksums = Checksums(size_bytes, row[_HEAD.size :])
    return checksums if seal == _seal(key, checksums) else None


def _seal(key: bytes, checksums: Checksums) -> int:
    digest: int = xxh3_64_intdigest(key + struct.pack("<Q", checksums.size_bytes) + checksums.digests)
    return digest
