"""POSIX and NFS paths. Every regular file is an object, hidden ones too, but not `.nfs*` (files that NFS
keeps for a process after their removal). Symbolic links are followed while they stay below the listed root.

A version is size, mtime and ctime. NFS answers them from a cache for up to a minute: opening asks the server
(close-to-open), and after the read `attributes.fresh` asks again. What changes within one tick of the file system's
clock (4 ms) and keeps its length cannot be seen.
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
from cachesvc.sources.attributes import Attributes, fresh

SCHEME = "file://"
_MAX_READ_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class FilesSource:
    """A `Source` of `file:///absolute/path` and plain absolute paths.

    `roots`: real paths that every file must lie under once it is open; empty allows all.
    """

    roots: tuple[str, ...] = ()

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Regular files below a folder, sorted by path bytes; a file lists as itself. Raises NotFound."""
        path = path_of(prefix)
        root = os.path.realpath(path)
        try:
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
            found = os.stat(path)
        except OSError as error:
            raise _translated(error, uri) from error
        if not stat.S_ISREG(found.st_mode):
            raise NotFound(f"{uri} is not a regular file")
        self._check(os.path.realpath(path), uri)
        return ObjectVersion(SCHEME + path, found.st_size, _etag(found))

    def read_into(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        """Read with the version checked on the open file before and after."""
        try:
            try:
                self._read(version, offset, into)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self._read(
                    version, offset, into
                )  # replaced on the server: the name now leads to another file
        except CacheError:
            raise
        except OSError as error:
            raise _translated(error, version.uri) from error

    def close(self) -> None:
        """Nothing is held."""

    def _read(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        # Without O_NONBLOCK, opening a FIFO waits for its writer.
        file = os.open(path_of(version.uri), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            if self.roots:
                self._check(os.readlink(f"/proc/self/fd/{file}"), version.uri)
            _unchanged(os.fstat(file), version)
            _read(file, offset, into, version)
            _unchanged(fresh(file), version)
        finally:
            os.close(file)

    def _below(self, path: str, root: str, above: tuple[str, ...]) -> Iterator[ObjectVersion]:
        with os.scandir(path) as entries:
            # "a-b" < "a/": sorted by the key that follows, a folder's name has its slash.
            named = sorted((os.fsencode(e.name) + b"/" * e.is_dir(), e) for e in entries)
        for _, entry in named:
            real = os.path.realpath(entry.path) if entry.is_symlink() else entry.path
            if entry.is_symlink() and not under(real, (root,)):
                continue
            if entry.is_dir():
                if real not in above:  # a link to a folder above would never end
                    yield from self._below(entry.path, root, (*above, real))
            elif entry.is_file() and not entry.name.startswith(".nfs"):
                found = entry.stat()
                yield ObjectVersion(SCHEME + _utf8(entry.path), found.st_size, _etag(found))

    def _check(self, real: str, uri: str) -> None:
        if self.roots and not under(real, self.roots):
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


def _etag(found: Attributes) -> str:
    return f"{found.st_mtime_ns}-{found.st_ctime_ns}"


def _utf8(path: str) -> str:
    try:
        path.encode()
    except UnicodeEncodeError as error:
        raise InvalidInput(f"a file name is not UTF-8: {os.fsencode(path)!r}; rename it") from error
    return path


def _unchanged(found: Attributes, version: ObjectVersion) -> None:
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
    if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
        return InvalidInput(f"{uri}: {error.strerror}")
    return SourceUnavailable(f"{uri}: {error.strerror}")
