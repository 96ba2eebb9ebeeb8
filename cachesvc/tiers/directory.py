"""The directory of an NVMe tier, locked by one daemon. All access goes through the lock's descriptor, so that a rename or a
mount at the path cannot lead it elsewhere."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cachesvc.core.errors import CacheError, InvalidInput, NotAllowed, TierFailed
from cachesvc.system.descriptors import closing_fd
from cachesvc.tiers.tier import tier_error, translated

Sync = Callable[[int], None]
"""Makes a file or a directory durable, given a descriptor; raises OSError."""
NAME = "cachesvc-nvme"
"""The directory below the one that `--nvme` names. A script beside a directory named as a package would import that instead
of the package."""
_NOTHING_THERE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG)


@dataclass(frozen=True, slots=True)
class Directory:
    """The directory that `--nvme` names, with a directory of ours in it, which one daemon locks."""

    path: Path
    home: Path
    """The locked directory: `NAME` below `path`."""
    lock: int
    """Descriptor of the locked directory. A process with a duplicate of it shares the lock."""
    mounted: bool
    """Whether a disk was mounted at the path when the daemon started."""
    place: tuple[int, int]
    """Device and inode of the locked directory."""

    @property
    def root(self) -> Path:
        """The folder of extents, named through the lock's descriptor, so that moving the directory or mounting over it does
        not change what the name means."""
        return Path(f"/proc/self/fd/{self.lock}/v1")

    def in_place(self) -> bool:
        """Tell whether the path still names this directory. Raises `TierFailed` or `OutOfSpace` when the disk does not
        say."""
        with translated(str(self.path), "look at the cache directory"):
            try:
                return os.path.samestat(os.stat(self.home), os.fstat(self.lock))
            except FileNotFoundError:
                return False

    def check(self) -> None:
        """Raise `TierFailed` when the path names another directory now, or none."""
        if not self.in_place():
            raise TierFailed(
                f"{self.home} is not the directory that this daemon locked: it was removed, moved, or another"
                " disk was mounted or unmounted there"
            )

    def close(self) -> None:
        """Release the lock."""
        os.close(self.lock)


def lock_directory(path: Path, sync: Sync, mounted: bool | None = None) -> Directory:
    """Lock a directory for this daemon and create its folders.

    `mounted`: whether a disk must be mounted at the path; None accepts both and records which it is. An empty mount point
    belongs to another disk.

    Raises `InvalidInput` (missing, or used by another daemon), `NotAllowed` or `OutOfSpace` for what the operator can
    repair, `TierFailed` for a failing disk.
    """
    try:
        if not _is_directory(path):
            raise InvalidInput(f"{path} is no directory: mount or create it, or name another for --nvme")
        here = os.path.ismount(os.path.realpath(path))
        if mounted and not here:
            raise InvalidInput(
                f"{path}: no disk is mounted there any more; mount one, or stop the daemon and start it again"
            )
        home = path.absolute() / NAME
        _make_home(home)
        lock = _locked(home)
        there = os.fstat(lock)
    except PermissionError as error:
        raise NotAllowed(f"{path} is not writable: give it to the daemon's user, or name another") from error
    except OSError as error:
        raise tier_error(error, str(path), "set up the tier") from error
    locked = Directory(
        path.absolute(), home, lock, here if mounted is None else mounted, (there.st_dev, there.st_ino)
    )
    try:
        with translated(str(path), "set up the tier"):
            lay_out(locked.root, sync)
    except CacheError:
        locked.close()
        raise
    return locked


def extent_folders(root: Path) -> Iterator[Path]:
    """Return the folders of extents, one for each first byte of their ids."""
    return (root / "extents" / f"{number:02x}" for number in range(256))


def lay_out(root: Path, sync: Sync) -> None:
    """Create the missing folders durably. Raises OSError."""
    for folder in (root, root / "extents", *extent_folders(root), root / "tmp"):
        _make(folder)
    for directory in (root / "extents", root, root / "..", root / "../.."):
        sync_directory(directory, sync)


def sync_directory(directory: str | Path, sync: Sync) -> None:
    """Make the entries of a directory durable. Raises OSError."""
    with closing_fd(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)) as fd:
        sync(fd)


def _is_directory(path: Path) -> bool:
    """Tell whether a path names a directory. Raises OSError for a failing disk, which is no fault of the path's."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as error:
        if error.errno not in _NOTHING_THERE:
            raise
        return False


def _make_home(home: Path) -> None:
    try:
        home.mkdir(mode=0o700)
    except FileExistsError:
        if not _is_directory(home):
            raise InvalidInput(
                f"{home} is no directory; remove what lies there, or name another directory for --nvme"
            ) from None


def _locked(home: Path) -> int:
    lock = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise InvalidInput(
            f"{home} is used by another cachesvc daemon, or named twice: stop it, or name each directory for --nvme once"
        ) from error
    return lock


def _make(folder: Path) -> None:
    """Create a folder. Remove a file of that name: it is no extent."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        os.unlink(folder)
        folder.mkdir(mode=0o700)
