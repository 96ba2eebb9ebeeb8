"""Translates operating-system errors of a tier into typed errors that say what to do."""

from __future__ import annotations

import errno

from cachesvc.core.errors import CacheError, OutOfSpace, TierFailed

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.ENOMEM})
_REMEDIES = {
    errno.EMFILE: "raise the open-file limit (LimitNOFILE, ulimit -n)",
    errno.ENFILE: "raise fs.file-max",
    errno.EROFS: "the file system is read-only: remount it, or name another directory",
    errno.EIO: "the device reports errors: look into dmesg, replace it or name another directory",
    errno.EFBIG: "raise the file-size limit (ulimit -f), or use smaller extents",
    errno.EACCES: "give the daemon's user access to the directory",
    errno.EPERM: "give the daemon's user access to the directory",
    errno.ENOENT: "a cached file was removed behind the daemon's back; leave the cache directory to it",
    errno.EBUSY: "the extent is still mapped writable by its filler",
}


def tier_error(error: OSError, where: str, doing: str) -> CacheError:
    """Return `OutOfSpace` for a full disk, quota or memory, else `TierFailed`; one line with the remedy.

    `where` names the tier; `doing` completes "cannot ..."."""
    said = f"{where}: cannot {doing}: {error.strerror or error}"
    if error.errno in _FULL:
        return OutOfSpace(f"{said}; free space there, or give the tier a smaller budget")
    remedy = _REMEDIES.get(error.errno or 0)
    return TierFailed(f"{said}; {remedy}" if remedy else said)


class translated:
    """Context manager that turns an OSError of its body into `tier_error`. Every grant enters one, and a generator-based
    context manager would cost as much as the rest of `RamTier.open`."""

    __slots__ = ("_doing", "_where")

    def __init__(self, where: str, doing: str) -> None:
        self._where, self._doing = where, doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, CacheError):
            raise tier_error(error, self._where, self._doing) from error
