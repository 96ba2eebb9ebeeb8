"""POSIX and NFS paths. Every regular file is an object, hidden ones too, but not `.nfs*` (files that NFS
keeps for a process after their removal). Symbolic links are followed while they stay below the listed root.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from cachesvc.core.errors import (
    CacheError,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
)
from cachesvc.core.model import ObjectVersion

SCHEME = "file://"
_MAX_READ_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class FilesSource:
    """A `Source` of `file:///absolute/path` and plain absolute paths.

    `roots`: real paths. What is opened must lie under the same of them as its URI does, by the path of its
    descriptor: links and folders may be swapped at any moment before that, not after. Empty allows all.
    """

    roots: tuple[str, ...] = ()

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Regular files below a folder, sorted by path bytes; a file lists as itself. Raises NotFound."""
        path = path_of(prefix)
        try:
            root = os.path.realpath(path)
            if stat.S_ISREG(os.stat(path).st_mode):
                yield self.head(prefix)
                return
            yield from self._below(path.rstrip("/") or "/", root, (root,))
        except CacheError:
            raise
        except OSError as error:
            raise _translated(error, prefix) from error

    def head(self, uri: str) -> ObjectVersion:
        """The file's size and version. Raises NotFound, NotAllowed."""
        path = path_of(uri)
        try:
            file = os.open(path, os.O_PATH | os.O_CLOEXEC)
            try:
                self._check(file, uri)
                found = os.fstat(file)
            finally:
                os.close(file)
        except CacheError:
            raise
        except OSError as error:
            raise _translated(error, uri) from error
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{uri} is not a regular file")
        return ObjectVersion(SCHEME + path, found.st_size, _etag(found))

    def read_into(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        """Read with the version checked on the open file before and after."""
        try:
            file = os.open(path_of(version.uri), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                self._check(file, version.uri)
                _unchanged(file, version)
                _read(file, offset, into, version)
                _unchanged(file, version)
            finally:
                os.close(file)
        except CacheError:
            raise
        except OSError as error:
            raise _translated(error, version.uri) from error

    def close(self) -> None:
        """Nothing is held."""

    def _below(self, path: str, root: str, above: tuple[str, ...]) -> Iterator[ObjectVersion]:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            self._check(folder, path)
            with os.scandir(folder) as entries:
                # "a-b" < "a/": sorted by the key that follows, a folder's name has its slash.
                named = sorted((os.fsencode(e.name) + b"/" * e.is_dir(), e) for e in entries)
            for _, entry in named:
                here = os.path.join(path, entry.name)
                real = os.path.realpath(here) if entry.is_symlink() else here
                if entry.is_symlink() and not under(real, (root,)):
                    continue
                if entry.is_dir():
                    if real not in above:  # a link to a folder above would never end
                        yield from self._below(here, root, (*above, real))
                elif entry.is_file() and not entry.name.startswith(".nfs"):
                    found = entry.stat()
                    yield ObjectVersion(SCHEME + _utf8(here), found.st_size, _etag(found))
        finally:
            os.close(folder)

    def _check(self, opened: int, uri: str) -> None:
        if not self.roots:
            return
        real = os.readlink(f"/proc/self/fd/{opened}")
        if not under(real, self.roots) or _root(real, self.roots) != _root(path_of(uri), self.roots):
            raise NotAllowed(f"{uri} leads outside what may be read, to {real}")


def path_of(uri: str) -> str:
    """The absolute path of a file URI or path. Raises InvalidInput."""
    path = uri.removeprefix(SCHEME)
    if not path.startswith("/") or "\0" in path:
        raise InvalidInput(f"not an absolute path: {uri!r}; write /path or file:///path")
    return path


def under(path: str, roots: tuple[str, ...]) -> bool:
    """Whether `path` is one of `roots` or below one, on path-segment borders."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _root(path: str, roots: tuple[str, ...]) -> str:
    """The innermost root: one may lie within another, and be for other users."""
    return max((root for root in roots if under(path, (root,))), key=len, default="")


def _etag(found: os.stat_result) -> str:
    return f"{found.st_mtime_ns}-{found.st_ctime_ns}"


def _utf8(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a file name is not UTF-8: {os.fsencode(path)!r}; rename it") from error
    return path


def _unchanged(file: int, version: ObjectVersion) -> None:
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise SourceChanged(f"{version.uri} is no longer a regular file")
    if found.st_size != version.size_bytes or (version.etag and _etag(found) != version.etag):
        raise SourceChanged(f"{version.uri} was written to since it was listed; open the dataset again")


def _read(file: int, offset: int, into: memoryview, version: ObjectVersion) -> None:
    done = 0
    while done < len(into):
        got = os.preadv(file, [into[done : done + _MAX_READ_BYTES]], offset + done)
        if not got:
            raise SourceChanged(f"{version.uri} ends early, at byte {offset + done}; open the dataset again")
        done += got


def _translated(error: OSError, uri: str) -> CacheError:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return NotFound(f"{uri}: no such file or folder")
    if error.errno in (errno.EACCES, errno.EPERM):
        return NotAllowed(f"{uri}: permission denied to user {os.getuid()}")
    if error.errno == errno.ESTALE:
        return SourceChanged(f"{uri} was replaced on the server; open the dataset again")
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return InvalidInput(f"{uri}: {error.strerror}")
    return SourceUnavailable(f"{uri}: {error.strerror}")
