"""An NVMe tier: one file for each extent, complete under its final name, or garbage that the next start removes.

<dir>/cachesvc-nvme/            locked by one daemon
<dir>/cachesvc-nvme/v1/tmp/     extents being filled
<dir>/cachesvc-nvme/v1/extents/xx/<hex id>.<size_bytes>
                                the extent's bytes, then its footer (`footer.py`)

The directory is the index: a name is a committed extent. No index can be damaged by a torn write or needs rebuilding, and
there is no mapping in which a disk error becomes SIGBUS.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from cachesvc.core.errors import CacheError, TierFailed
from cachesvc.core.model import ExtentId, TierName
from cachesvc.tiers import footer
from cachesvc.tiers.directory import Directory, Sync, extent_folders, lay_out, lock_directory, sync_directory
from cachesvc.tiers.probe import Room, probe
from cachesvc.tiers.tier import Checksums, translated

_T = TypeVar("_T")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""O_NONBLOCK: opening a FIFO that has an extent's name must not wait for a writer. It changes nothing for files."""
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FILE_MODE = 0o400  # readers get read-only descriptors and cannot open a writable one from them
_TRUSTED_BYTES = 1 << 30
"""At a start, the size in a name is trusted up to this; the few larger files are looked at."""


class NvmeTier:
    """Extents as files below one directory. Built by `open_nvme`; call `recover` before anything else.

    The order of events, and what a crash or power cut after each leaves (in brackets what recovery does with it):
      1. reserve: temporary file, allocated           -> temporary file [removed]
      2. the filler writes and checks the bytes       -> temporary file [removed]
      3. commit: the footer is written                -> temporary file [removed]
      4. fsync of the file                            -> temporary file [removed]
      5. rename to its final name                     -> a complete extent, or a temporary file [kept, or removed]
      6. fsync of the directory                       -> committed [kept]
      7. evict: unlink without a sync                 -> nothing, or a complete extent [kept: its bytes are right]
    """

    def __init__(self, name: TierName, directory: Directory, sync: Sync) -> None:
        self.name = name
        self.directory = directory
        self._root = directory.root
        self._where = f"{name} ({directory.path})"
        self._sync = sync
        self._sizes: dict[ExtentId, int] = {}
        self._filling: dict[ExtentId, int] = {}
        self._held: dict[ExtentId, Checksums] = {}
        """Extents of `_filling` that are never committed; the next start removes their files."""
        self._unremoved: dict[str, None] = {}
        """Files whose removal failed; one is tried again at each reservation and eviction."""
        self._commit_lock = threading.Lock()  # orders a commit's last step against `open` and `abort`

    def reserve(self, extent: ExtentId, size_bytes: int, shrinks: bool = False) -> int:
        """Return a read-write descriptor of a temporary file with `size_bytes` allocated; the caller closes it.

        Raises `OutOfSpace` when the disk is full, `TierFailed` when it is read-only or broken.
        """
        assert extent not in self._filling, "reserved twice"
        path = self._temporary(extent)
        self._retry_removal()
        with translated(self._where, "reserve space"):
            self._remove(path)  # always a new file: a stuck filler may still write to the old one
            own = self._with_folders(partial(os.open, path, _NEW, _FILE_MODE))
            try:
                os.posix_fallocate(own, 0, size_bytes + footer.footer_bytes(size_bytes))
                given = os.dup(own)
            except OSError:
                os.close(own)
                self._remove_quietly(path)
                raise
        self._filling[extent] = own
        self._sizes[extent] = size_bytes
        self._unremoved.pop(self._final(extent), None)  # a file of that name will be this extent's
        return given

    def shrink(self, extent: ExtentId, size_bytes: int) -> None:
        """Give the end of a reservation back to the disk. Raises `TierFailed`."""
        with translated(self._where, "shrink an extent"):
            os.ftruncate(self._filling[extent], size_bytes + footer.footer_bytes(size_bytes))
        self._sizes[extent] = size_bytes

    def commit(self, extent: ExtentId, checksums: Checksums) -> None:
        """Take steps 3 to 6; may run beside the other calls. After an error the caller aborts: a failed fsync must not be
        retried, since the kernel has dropped the pages.

        Raises `TierFailed`, `OutOfSpace`.
        """
        own = self._filling[extent]
        whole_bytes = checksums.size_bytes + footer.footer_bytes(checksums.size_bytes)
        final = self._final(extent)
        with translated(self._where, "commit an extent"):
            if os.fstat(own).st_size != whole_bytes or self._sizes[extent] != checksums.size_bytes:
                raise TierFailed(f"{self._where}: extent {extent.hex()} changed its size while it was filled")
            footer.write(own, extent, checksums)
            self._sync(own)
            self._with_folders(partial(os.rename, self._temporary(extent), final))
            sync_directory(os.path.dirname(final), self._sync)
        with self._commit_lock, suppress(OSError):  # all bytes are durable already
            os.close(self._filling.pop(extent))

    def hold(self, extent: ExtentId, checksums: Checksums) -> None:
        """Take step 3 alone. Raises `TierFailed`, `OutOfSpace`."""
        with translated(self._where, "hold an extent"):
            footer.write(self._filling[extent], extent, checksums)
        self._held[extent] = checksums

    def abort(self, extent: ExtentId) -> None:
        """Drop a reservation, or an extent whose commit failed. Ignores unknown extents. Must not run during a commit."""
        with self._commit_lock:
            own = self._filling.pop(extent, None)
            self._held.pop(extent, None)
        if own is None:
            return
        with suppress(OSError):  # the file is removed, so a failed write does not matter
            os.close(own)
        for path in (self._temporary(extent), self._final(extent)):
            self._remove_quietly(path)
        del self._sizes[extent]

    def open(self, extent: ExtentId) -> tuple[int, Checksums | None]:
        """Return a read-only descriptor (the caller closes it) and the checksums; None before `commit` or `hold`.

        Raises `TierFailed` when the file is gone, `CorruptData` when its footer is damaged.
        """
        with self._commit_lock, translated(self._where, "open an extent"):
            own = self._filling.get(extent)
            if own is not None:  # the descriptor survives the rename
                held = self._held.get(extent)
                return os.open(f"/proc/self/fd/{own}", os.O_RDONLY | os.O_CLOEXEC), held
        if extent not in self._sizes:
            raise TierFailed(f"{self._where}: extent {extent.hex()} is not here")
        with translated(self._where, "open an extent"):
            fd = os.open(self._final(extent), _READ)
            try:
                return fd, footer.read(fd, extent, self._sizes[extent])
            except (OSError, CacheError):
                os.close(fd)
                raise

    def evict(self, extent: ExtentId) -> None:
        """Remove an extent, also one whose commit failed. A missing file is no error.

        Raises `TierFailed`.
        """
        self.abort(extent)
        if extent not in self._sizes:
            return
        self._retry_removal()
        path = self._final(extent)
        del self._sizes[extent]
        with translated(self._where, "remove an extent"):
            self._remove(path)

    def recover(self, progress: Callable[[], None] = lambda: None) -> dict[ExtentId, int]:
        """Remove garbage; return every committed extent and its size in bytes. Calls `progress` after each folder.

        Reads names alone, so that a million extents take seconds. The caller must verify each extent before its first
        grant. Raises `TierFailed`.
        """
        with translated(self._where, "recover"):
            for name in os.listdir(self._root / "tmp"):
                _remove(self._root / "tmp" / name)
                progress()
            for folder in extent_folders(self._root):
                self._sizes.update(_extents_in(folder))
                progress()
        return dict(self._sizes)

    def probe(self, thorough: bool, sync: bool = True) -> Room:
        """Check that the directory works and that its path still leads to it, and return the disk's room. Thread-safe.
        `thorough` creates missing folders again; see `probe.probe` for it and `sync`. Raises `TierFailed`."""
        self.directory.check()
        if thorough and not self._root.is_dir():
            with translated(self._where, "lay out the cache directory"):
                lay_out(self._root, self._sync)
        return probe(self._root, self._where, thorough, sync)

    def close(self) -> None:
        """Drop reservations, close descriptors and release the directory's lock."""
        for extent in list(self._filling):
            self.abort(extent)
        self.directory.close()

    def _remove(self, path: str) -> None:
        """Remove a file. Raises OSError, and notes the file in `_unremoved`."""
        self._unremoved.pop(path, None)
        try:
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError:
            self._unremoved[path] = None
            raise

    def _remove_quietly(self, path: str) -> None:
        with suppress(OSError):
            self._remove(path)

    def _retry_removal(self) -> None:
        for path in tuple(self._unremoved)[:1]:
            self._remove_quietly(path)

    def _with_folders(self, call: Callable[[], _T]) -> _T:
        """Return the result of a call; when folders were removed behind the daemon's back, create them and call again.
        Extents that were in them are found missing when they are opened."""
        try:
            return call()
        except FileNotFoundError:
            lay_out(self._root, self._sync)
            return call()

    def _temporary(self, extent: ExtentId) -> str:
        return f"{self._root}/tmp/{extent.hex()}"

    def _final(self, extent: ExtentId) -> str:
        """Return the extent's final path as text. `Path` would intern each part, and ever new names would rebuild the
        interpreter's table of interned strings: 1.9 MB each time, which stay with the thread that did it."""
        text = extent.hex()
        return f"{self._root}/extents/{text[:2]}/{text}.{self._sizes[extent]}"


def open_nvme(
    name: TierName,
    directory: Path,
    sync: Sync = os.fsync,
    mounted: bool | None = None,
) -> NvmeTier:
    """Lock a directory for this daemon and make a tier of it. See `lock_directory` for `mounted`.

    Raises `InvalidInput` (missing, or used by another daemon), `NotAllowed`, `OutOfSpace`, `TierFailed`.
    """
    return NvmeTier(name, lock_directory(directory, sync, mounted), sync)


def _extents_in(folder: Path) -> Iterator[tuple[ExtentId, int]]:
    """Return the extents that the names in a folder state; remove other files."""
    sizes: dict[str, int] = {}  # few sizes differ: each is parsed once
    for name in os.listdir(folder):
        text, size = name[:32], name[32:]
        try:
            size_bytes = sizes.get(size)
            if size_bytes is None:
                size_bytes = sizes[size] = _size_of(size)
            extent = ExtentId(bytes.fromhex(text))
        except ValueError:
            extent, size_bytes = ExtentId(b""), 0
        named = extent.hex() == text and len(text) == 32 and text[:2] == folder.name
        if named and (size_bytes <= _TRUSTED_BYTES or _has_size(folder / name, size_bytes)):
            yield extent, size_bytes
        else:
            _remove(folder / name)


def _size_of(text: str) -> int:
    """Parse the suffix of a file's name. Raises ValueError for any suffix that `NvmeTier` does not write."""
    size_bytes = int(text[1:])
    if text != f".{size_bytes}" or size_bytes < 0:
        raise ValueError(text)
    return size_bytes


def _has_size(path: Path, size_bytes: int) -> bool:
    """Tell whether a file has the length of an extent of `size_bytes` with its footer."""
    return os.lstat(path).st_size == size_bytes + footer.footer_bytes(size_bytes)


def _remove(path: Path) -> None:
    """Remove a file that is no extent. A directory is not ours and stays."""
    with suppress(IsADirectoryError):
        os.unlink(path)
