"""The end of catalogs that nobody uses. A file's time says when it was last used, to the day.

Who is about to use one says so (`used`), who removes one looks again (`remove_unused`), each with a lock on the file:
so none goes between being found and being opened, whichever processes do it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Container
from contextlib import suppress

_DAY_S = 86_400.0
UNUSED_S = 30 * _DAY_S
"""A job comes back within a month, or lists and indexes its data once more."""


def used(path: str) -> bool:
    """Say that a catalog is used; False where there is none (any more)."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True  # who opens it is told why it cannot be
    try:
        if _age_s(fd) > _DAY_S:
            with suppress(OSError):  # where neither can be done, it is built once more in the end
                fcntl.flock(fd, fcntl.LOCK_SH)
                os.utime(fd)
        return os.fstat(fd).st_nlink > 0
    finally:
        os.close(fd)


def remove_unused(directory: str, kept: Container[str]) -> list[str]:
    """Remove the files that nobody has used for 30 days, but catalogs whose ids are `kept`: those are in use. The names
    of what was removed. Raises OSError."""
    removed = []
    with os.scandir(directory) as found:
        for each in found:
            if each.name.removesuffix(".lmdb") in kept:
                used(each.path)
                continue
            with suppress(FileNotFoundError):  # another daemon was quicker
                if (
                    each.is_file(follow_symlinks=False)
                    and _age_s(each.path) > UNUSED_S
                    and _removed(each.path)
                ):
                    removed.append(each.name)
    return removed


def _removed(path: str) -> bool:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _age_s(fd) <= UNUSED_S or not os.fstat(fd).st_nlink:
            return False  # used since it was listed, or removed and built anew
        os.unlink(path)
        return True
    except BlockingIOError:
        return False  # somebody says just now that it is used
    finally:
        os.close(fd)


def _age_s(file: int | str) -> float:
    return time.time() - os.stat(file).st_mtime
