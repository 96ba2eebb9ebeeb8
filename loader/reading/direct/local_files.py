"""Grants for extents that are a range of a local file: the file itself, with an offset. Local paths need no daemon."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence

from cachesvc.client.protocol import CLOSED, Granted, Grants, Refused
from cachesvc.core.errors import CacheError, NotAllowed, NotFound, SourceChanged, SourceUnavailable
from cachesvc.core.model import Extent, ObjectVersion, Piece
from cachesvc.sources.files import etag_of
from cachesvc.sources.uri import local_path
from loader.reading.direct.direct_fills import DirectGrants


class LocalGrants:
    """Grants descriptors of the local files themselves, or `copies` of the extents that `follow` names. Until a copy is
    filled, its file is granted, for one read at a time. `others` grants extents of several pieces and compressed ones."""

    def __init__(self, extent_of: Callable[[int], Extent], others: Grants, copies: DirectGrants) -> None:
        self._extent_of, self._others, self._copies = extent_of, others, copies
        self._copied: frozenset[int] = frozenset()
        self._refused: set[int] = set()
        """Extents for whose copies there was no room at the last request."""
        self._leased: dict[Grants, Counter[int]] = {others: Counter(), copies: Counter()}
        self._closed = False

    def follow(self, extents: Sequence[int], copy_bytes: int) -> None:
        """Copy these extents from now on, in this order and within this budget, if it is not 0."""
        self._copied = frozenset(extents) if copy_bytes else frozenset()
        if copy_bytes:
            self._copies.follow(extents, copy_bytes)

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """See `Grants`. Raises NotFound or SourceChanged when a file is not the version in the catalog, NotAllowed, and
        SourceUnavailable where it cannot be opened now."""
        if self._closed:
            raise CacheError(CLOSED)
        found = {index: self._file_of(index) for index in extents}
        files = {index: file for index, file in found.items() if file is not None}
        copied = [index for index in files if index in self._copied]
        filled, without_room = self._copies.prepare(copied) if copied else (set[int](), set[int]())
        self._refused = without_room - self._refused
        for index in self._refused:  # the reader releases what it does not need, and asks again
            del files[index]
        elsewhere: dict[Grants, list[int]] = {
            self._others: [index for index in extents if found[index] is None],
            self._copies: [index for index in extents if index in filled],
        }
        answers: list[Granted | Refused] = [Refused(index) for index in self._refused]
        try:
            for index, (piece, path) in files.items():
                if index not in filled:
                    once = index in self._copied
                    fd = _open(piece, path)
                    answers.append(
                        Granted(index, fd, piece.offset, piece.length, "local", once=once, brief=once)
                    )
            for grants, wanted in elsewhere.items():
                if wanted:
                    given = grants.acquire(wanted, timeout_s)
                    answers += given
                    self._leased[grants].update(each.extent for each in given if isinstance(each, Granted))
        except BaseException:
            for answer in answers:
                if isinstance(answer, Granted):
                    os.close(answer.fd)
            self.release([answer.extent for answer in answers])
            raise
        return answers

    def _file_of(self, index: int) -> tuple[Piece, str] | None:
        """Return the range of a local file that an extent is, and the file's path; None for other extents."""
        pieces = self._extent_of(index).pieces
        path = local_path(pieces[0].object.uri) if len(pieces) == 1 and not pieces[0].codec else None
        return None if path is None else (pieces[0], path)

    def release(self, extents: Sequence[int]) -> None:
        """See `Grants`. The lease of a local file is its descriptor, which the receiver has closed."""
        for grants, leased in self._leased.items():
            mine = [extent for extent in extents if leased[extent] > 0]
            if mine:
                leased.subtract(mine)
                grants.release(mine)

    def passed(self, step: int) -> None:
        """See `Grants`."""
        self._others.passed(step)

    def close(self) -> None:
        """See `Grants`."""
        self._closed = True
        for grants, leased in self._leased.items():
            grants.close()
            leased.clear()


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
