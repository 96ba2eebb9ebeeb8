"""Removes catalog files that are no longer used. A file's modification time is its last use, to the minute.

A process marks a catalog as used before it opens it (`mark_used`), and checks the time again before it removes one
(`remove_unused`). Each holds a lock on the file, so no catalog is removed between the two steps of another process.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Container, Sequence
from contextlib import suppress

from cachesvc.system.descriptors import closing_fd

FRESH_S = 60.0
"""Time within which a process opens a catalog that it has marked."""
UNUSED_S = 30 * 86_400.0
"""Age at which a catalog is removed. A job that returns later lists and indexes its data again."""
UNUSED_BYTES = 16 << 30
"""Limit of all unused catalogs together, besides the free space of their disk. Each combination of options makes another
catalog, and any user chooses options."""


def mark_used(path: str) -> bool:
    """Mark a catalog as used. Returns False where there is none, or it was removed meanwhile."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # opening it raises the reason
    with closing_fd(fd):
        if _age_s(fd) > FRESH_S:
            with suppress(OSError):  # without lock or time it may be removed, and is built again
                fcntl.flock(fd, fcntl.LOCK_SH)
                os.utime(fd)
        return os.fstat(fd).st_nlink > 0


def remove_unused(directory: str, kept: Container[str], most_bytes: int = UNUSED_BYTES) -> list[str]:
    """Remove files unused for 30 days, then the longest-unused catalogs while they exceed a limit; return their names.

    The limit is `most_bytes` or the disk's free space, whichever is smaller. Catalogs whose id is in `kept` are in use and
    stay. Raises OSError.
    """
    removed, left = [], []
    with os.scandir(directory) as files:
        for each in files:
            if each.name.removesuffix(".lmdb") in kept:
                mark_used(each.path)
                continue
            with suppress(FileNotFoundError):  # another daemon removed it
                if not each.is_file(follow_symlinks=False):
                    continue
                if _age_s(each.path) > UNUSED_S and _removed(each.path, UNUSED_S):
                    removed.append(each.name)
                elif each.name.endswith(".lmdb"):
                    left.append((each.stat().st_mtime, each.stat().st_blocks * 512, each.path))
    return removed + _removed_beyond(sorted(left), directory, most_bytes)


def _removed_beyond(left: Sequence[tuple[float, int, str]], directory: str, most_bytes: int) -> list[str]:
    """Remove the first of (time, size in bytes, path) while they exceed the limit; return the names of removed ones."""
    disk = os.statvfs(directory)
    free_bytes, taken = disk.f_bavail * disk.f_frsize, sum(size for _, size, _ in left)
    removed = []
    for _, size, path in left:
        if taken <= min(most_bytes, free_bytes):
            break
        with suppress(FileNotFoundError):
            if _age_s(path) > FRESH_S and _removed(path, FRESH_S):
                removed.append(os.path.basename(path))
                taken, free_bytes = taken - size, free_bytes + size
    return removed


def _removed(path: str, age_s: float) -> bool:
    with closing_fd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)) as fd:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _age_s(fd) <= age_s or not os.fstat(fd).st_nlink:
                return False  # used, or removed and built again, since it was listed
            os.unlink(path)
            return True
        except BlockingIOError:
            return False  # another process is marking it


def _age_s(file: int | str) -> float:
    return time.time() - os.stat(file).st_mtime
