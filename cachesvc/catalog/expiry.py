"""The end of catalogs that nobody uses. A file's time says when it was last used, to the minute.

Who is about to use one says so (`used`), who removes one looks again (`remove_unused`), each with a lock on the file:
so none goes between being found and being opened, whichever processes do it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Container, Sequence
from contextlib import suppress

FRESH_S = 60.0
"""Whoever finds a catalog has opened it by then."""
UNUSED_S = 30 * 86_400.0
"""A job comes back within a month, or lists and indexes its data once more."""
UNUSED_BYTES = 16 << 30
"""Of all that nobody uses, and never more than their disk has left: each option makes another one, and anybody chooses."""


def mark_used(path: str) -> bool:
    """Say that a catalog is used; False where there is none (any more)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # who opens it is told why it cannot be
    try:
        if _age_s(fd) > FRESH_S:
            with suppress(OSError):  # where neither can be done, it is built once more in the end
                fcntl.flock(fd, fcntl.LOCK_SH)
                os.utime(fd)
        return os.fstat(fd).st_nlink > 0
    finally:
        os.close(fd)


def remove_unused(directory: str, kept: Container[str], most_bytes: int = UNUSED_BYTES) -> list[str]:
    """Remove the files that nobody has used for 30 days, and of catalogs those that nobody has used for longest while they
    take more than `most_bytes`, or than the disk has left; but none whose id is `kept`: those are in use. The names of
    what was removed. Raises OSError."""
    removed, left = [], []
    with os.scandir(directory) as found:
        for each in found:
            if each.name.removesuffix(".lmdb") in kept:
                mark_used(each.path)
                continue
            with suppress(FileNotFoundError):  # another daemon was quicker
                if not each.is_file(follow_symlinks=False):
                    continue
                if _age_s(each.path) > UNUSED_S and _removed(each.path, UNUSED_S):
                    removed.append(each.name)
                elif each.name.endswith(".lmdb"):
                    left.append((each.stat().st_mtime, each.stat().st_blocks * 512, each.path))
    return removed + _removed_beyond(sorted(left), directory, most_bytes)


def _removed_beyond(left: Sequence[tuple[float, int, str]], directory: str, most_bytes: int) -> list[str]:
    """Of (time, size in bytes, path), the first ones; the names of those that are removed."""
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
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _age_s(fd) <= age_s or not os.fstat(fd).st_nlink:
            return False  # used since it was listed, or removed and built anew
        os.unlink(path)
        return True
    except BlockingIOError:
        return False  # somebody says just now that it is used
    finally:
        os.close(fd)


def _age_s(file: int | str) -> float:
    return time.time() - os.stat(file).st_mtime
