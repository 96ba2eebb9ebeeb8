"""An NVMe tier: one file an extent, whole under its final name, or garbage that start-up removes.

<dir>/cachesvc/            locked by one daemon
<dir>/cachesvc/v1/tmp/     being filled
<dir>/cachesvc/v1/extents/xx/<hex id>.<size_bytes>
                           the extent's bytes, then what the file says of itself (`footer.py`)

The directory is the index: a name is a committed extent. So there is nothing to rebuild, nothing that a torn
write could damage for all extents at once, and no mapping in which a disk error would be a SIGBUS.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

from cachesvc.core.errors import CacheError, TierFailed
from cachesvc.core.model import ExtentId, TierName
from cachesvc.tiers import footer
from cachesvc.tiers.directory import Directory, Sync, extent_folders, lay_out, lock_directory, sync_directory
from cachesvc.tiers.os_errors import translated
from cachesvc.tiers.probe import Room, probe
from cachesvc.tiers.tier import Checksums

_T = TypeVar("_T")
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
"""Without the last one, opening a pipe of an extent's name would wait for its writer; files do not care."""
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
_FILE_MODE = 0o400  # readers get read-only descriptors and cannot open a writable one from them
_TRUSTED_BYTES = 1 << 30
"""What a name says of an extent up to this size is believed at a start; of few larger ones, their file is asked."""


class NvmeTier:
    """Extents as files below one directory. Built by `open_nvme`; call `recover` before anything else.

    The order of events, and what a crash or power cut after each leaves (recovery's action in brackets):
      1. reserve: temporary file, allocated           -> temporary file [removed]
      2. the filler writes and checks the bytes       -> temporary file [removed]
      3. commit: the footer is written                -> temporary file [removed]
      4. fsync of the file                            -> temporary file [removed]
      5. rename to its final name                     -> a whole extent, or a temporary file [kept, or removed]
      6. fsync of the directory                       -> committed [kept]
      7. evict: unlink, not waited for                -> nothing, or a whole extent [kept: its bytes are right]
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
        """Keys of `_filling` that stay uncommitted: a start removes their files, like all that was not committed."""
        self._unremoved: dict[str, None] = {}
        """Files that the disk would not remove: tried again, one at each reservation and eviction."""
        self._commit_lock = threading.Lock()  # a commit's last step against open and abort

    def reserve(self, extent: ExtentId, size_bytes: int) -> int:
        """A read-write descriptor of a temporary file with `size_bytes` allocated; the caller closes it.

        Raises `OutOfSpace` when the disk is full, `TierFailed` when it is read-only or broken.
        """
        assert extent not in self._filling, "reserved twice"
        path = self._temporary(extent)
        self._retry_removal()
        with translated(self._where, "reserve space"):
            self._remove(path)  # a new file, never one that a stuck filler may still write to
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
        self._unremoved.pop(self._final(extent), None)  # from here on what is there is this one
        return given

    def commit(self, extent: ExtentId, checksums: Checksums) -> None:
        """Steps 3 to 6; may run beside the other calls. After an error, `abort` cleans up: an fsync that
        failed must not be tried again, the kernel has dropped the pages.

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
        with self._commit_lock, suppress(OSError):  # all of it is durable
            os.close(self._filling.pop(extent))

    def hold(self, extent: ExtentId, checksums: Checksums) -> None:
        """Step 3 alone. Raises `TierFailed`, `OutOfSpace`."""
        with translated(self._where, "hold an extent"):
            footer.write(self._filling[extent], extent, checksums)
        self._held[extent] = checksums

    def abort(self, extent: ExtentId) -> None:
        """Forget a reservation or a commit that failed; unknown extents are ignored. Not during a commit."""
        with self._commit_lock:
            own = self._filling.pop(extent, None)
            self._held.pop(extent, None)
        if own is None:
            return
        with suppress(OSError):  # what could not be written goes anyway
            os.close(own)
        for path in (self._temporary(extent), self._final(extent)):
            self._remove_quietly(path)
        del self._sizes[extent]

    def open(self, extent: ExtentId) -> tuple[int, Checksums | None]:
        """A read-only descriptor (the caller closes it) and the checksums; None before `commit` or `hold`.

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
        """Remove an extent, also one whose commit failed. A file that is gone already is no error.

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
        """Every committed extent and its size in bytes, once garbage is dropped; `progress` is called each time that the
        disk has answered.

        The names are all that is read, so that a million extents take seconds: verify each before its first
        grant. A name that says more than a file holds would have good extents evicted. Raises `TierFailed`.
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
        """Whether the directory works and is still where its path leads, and the room on its disk; from any
        thread. One that was emptied is laid out again when `thorough`; `sync` as `probe` has it. Raises `TierFailed`."""
        self.directory.check()
        if thorough and not self._root.is_dir():
            with translated(self._where, "lay out the cache directory"):
                lay_out(self._root, self._sync)
        return probe(self._root, self._where, thorough, sync)

    def close(self) -> None:
        """Give back descriptors and the directory's lock; reservations are dropped."""
        for extent in list(self._filling):
            self.abort(extent)
        self.directory.close()

    def _remove(self, path: str) -> None:
        """Raises OSError; the file, which nothing counts, is then `_unremoved`."""
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
        """The result of a call, which is made again where somebody had removed our folders: else nothing could be
        kept until the next start. What was in them is found missing when it is opened."""
        try:
            return call()
        except FileNotFoundError:
            lay_out(self._root, self._sync)
            return call()

    def _temporary(self, extent: ExtentId) -> str:
        return f"{self._root}/tmp/{extent.hex()}"

    def _final(self, extent: ExtentId) -> str:
        """No `Path`: it interns each part, and ever new names rebuild the interpreter's table of interned strings
        again and again, 1.9 MB each time, which stay with the thread that happened to do it."""
        text = extent.hex()
        return f"{self._root}/extents/{text[:2]}/{text}.{self._sizes[extent]}"


def open_nvme(
    name: TierName,
    directory: Path,
    sync: Sync = os.fsync,
    locks: Sequence[int] = (),
    mounted: bool | None = None,
) -> NvmeTier:
    """Lock a directory for this daemon and open what is in it; `locks` and `mounted` as `lock_directory` has them.

    Raises `InvalidInput` (missing, or used by another daemon), `NotAllowed`, `OutOfSpace`, `TierFailed`.
    """
    return NvmeTier(name, lock_directory(directory, sync, locks, mounted), sync)


def _extents_in(folder: Path) -> Iterator[tuple[ExtentId, int]]:
    """The extents that the names of a directory's files say; other files are removed."""
    sizes: dict[str, int] = {}  # few differ: each is read once, and one number kept of it
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
    """The size in a name's end. Raises ValueError for any end that `NvmeTier` does not write."""
    size_bytes = int(text[1:])
    if text != f".{size_bytes}" or size_bytes < 0:
        raise ValueError(text)
    return size_bytes


def _has_size(path: Path, size_bytes: int) -> bool:
    """Whether a file is as long as one of such an extent."""
    return os.lstat(path).st_size == size_bytes + footer.footer_bytes(size_bytes)


def _remove(path: Path) -> None:
    """What is no extent; a directory stays, as somebody else's."""
    with suppress(IsADirectoryError):
        os.unlink(path)
