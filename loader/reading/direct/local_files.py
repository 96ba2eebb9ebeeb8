"""Grants for extents that are a range of a local file: the file itself, with an offset. Local paths need no daemon."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

from cachesvc.client.protocol import CLOSED, Granted, Grants, Refused
from cachesvc.core.errors import CacheError, NotAllowed, NotFound, SourceChanged, SourceUnavailable
from cachesvc.core.model import Extent, ObjectVersion, Piece
from cachesvc.sources.files import etag_of
from cachesvc.sources.uri import local_path


class LocalGrants:
    """Grants descriptors of the local files themselves; `others` grants extents of several pieces and compressed
    ones."""

    def __init__(self, extent_of: Callable[[int], Extent], others: Grants) -> None:
        self._extent_of, self._others = extent_of, others
        self._from_others: set[int] = set()
        self._closed = False

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`. Raises NotFound or SourceChanged when a file is not the version in the catalog, NotAllowed, and
        SourceUnavailable where it cannot be opened now."""
        if self._closed:
            raise CacheError(CLOSED)
        others, answers = [], list[Granted | Refused]()
        try:
            for index in extents:
                extent = self._extent_of(index)
                piece = extent.pieces[0] if len(extent.pieces) == 1 else None
                path = local_path(piece.object.uri) if piece is not None and not piece.codec else None
                if piece is not None and path is not None:
                    fd = _open(piece, path)
                    answers.append(Granted(index, fd, piece.offset, extent.size_bytes, "local"))
                else:
                    others.append(index)
            if others:
                self._from_others.update(others)
                answers += self._others.acquire(others, timeout_s)
        except BaseException:
            for answer in answers:
                if isinstance(answer, Granted):
                    os.close(answer.fd)
            raise
        return answers

    def release(self, extents: Sequence[int]) -> None:
        """See `Grants`. The lease of a local file is its descriptor, which the receiver has closed."""
        from_others = [extent for extent in extents if extent in self._from_others]
        if from_others:
            self._others.release(from_others)

    def passed(self, step: int) -> None:
        """See `Grants`."""
        self._others.passed(step)

    def close(self) -> None:
        """See `Grants`."""
        self._closed = True
        self._others.close()


def _open(piece: Piece, path: str) -> int:
    try:
        # Without O_NONBLOCK, opening a FIFO waits for its writer.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise NotFound(f"{path} is gone since the dataset was opened; open it again") from None
    except PermissionError:
        raise NotAllowed(f"{path} may not be read by this user") from None
    except OSError as error:  # too many open files, a stale handle: the sample is not bad
        raise SourceUnavailable(f"{path} cannot be opened: {error.strerror}; try again when it can") from None
    found = os.fstat(fd)
    etag = piece.object.etag
    if found.st_size != piece.object.size_bytes or (etag and etag != etag_of(found)):
        os.close(fd)
        raise changed(path)
    return fd


def written_to(found: os.stat_result, stored: ObjectVersion) -> bool:
    """True if a file was modified after it was opened at this version. A new ctime does not count: unlinking sets it."""
    mtime = stored.etag.rpartition("-")[0]
    return found.st_size != stored.size_bytes or (bool(mtime) and mtime != str(found.st_mtime_ns))


def changed(path: str) -> SourceChanged:
    """The error for a request of a version that is gone."""
    return SourceChanged(f"{path} changed since the dataset was opened; open it again")
