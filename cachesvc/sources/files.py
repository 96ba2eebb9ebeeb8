"""The source of POSIX and NFS paths.

Every regular file is an object, hidden ones too, except `.nfs*` (files that NFS keeps for a process after their removal).
Folders that are hidden or never hold data (`ignored.py`) are not opened: a `.snapshot` may hold the whole file system
again. The latter, and `.hoodie`, are listed as empty objects whose names end in "/". Symbolic links are followed while
they stay below the listed root.

A version is size, mtime and ctime. NFS clients cache these for up to a minute. Opening a file asks the server
(close-to-open), and `stat_from_server` asks again after the read. A change within one tick of the file system's clock (4
ms) that keeps the length is not detected.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cachesvc.core.errors import (
    CacheError,
    InvalidInput,
    NotAllowed,
    NotFound,
    SourceChanged,
    SourceUnavailable,
    translating,
)
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.file_attributes import Attributes, stat_from_server
from cachesvc.sources.ignored import is_ignored_folder, is_named_folder
from cachesvc.sources.source import OnReceived, Source, ignore_received
from cachesvc.system.descriptors import closing_fd

SCHEME = "file://"
_MAX_READ_BYTES = 1 << 30
_MAX_DEPTH = 500
"""The limit of nested folders: while it is listed, each takes a descriptor and some of the interpreter's 1,000 frames."""
_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class FilesSource(Source):
    """A `Source` of `file:///absolute/path` and plain absolute paths.

    `roots`: the real paths that may be read; empty allows all. A file must lie under the same root as its URI, judged by
    the path of its open descriptor: links and folders may be replaced at any moment before the opening. `heartbeat` is
    called at each step of a listing.
    """

    roots: tuple[str, ...] = ()
    heartbeat: Callable[[], None] = lambda: None

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Yield the regular files below a folder, sorted by path bytes, or the file that the prefix names. Raises NotFound,
        NotAllowed, InvalidInput."""
        path = path_of(prefix)
        with self._translating(prefix):
            with self._place(path, prefix) as (file, found):
                if stat.S_ISREG(found.st_mode):
                    yield _version(path, found)
                    return
                folder = os.open(".", _FOLDER, dir_fd=file)
            yield from self._list_folder(folder, path.rstrip("/") or "/", ())

    def head(self, uri: str) -> ObjectVersion:
        """Return the file's size and version. Raises NotFound, NotAllowed."""
        path = path_of(uri)
        with self._translating(uri), self._place(path, uri) as (_, found):
            if not stat.S_ISREG(found.st_mode):
                raise NotFound(f"{uri} is not a regular file")
        return _version(path, found)

    @contextmanager
    def _place(self, path: str, uri: str) -> Iterator[tuple[int, os.stat_result]]:
        """Open a file or folder without its content; yield the descriptor and the attributes."""
        with closing_fd(os.open(path, os.O_PATH | os.O_CLOEXEC)) as file:
            self._check(file, uri)
            yield file, os.fstat(file)

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Read a range; check the version on the open file before and after."""
        with self._translating(version.uri):
            try:
                self._read(version, offset, into)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                self._read(version, offset, into)  # replaced on the server: opens the new file

    def _read(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        # Without O_NONBLOCK, opening a FIFO waits for its writer.
        with closing_fd(os.open(path_of(version.uri), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as file:
            self._check(file, version.uri)
            _unchanged(os.fstat(file), version)
            _read(file, offset, into, version)
            _unchanged(stat_from_server(file), version)

    def _list_folder(self, folder: int, path: str, above: tuple[str, ...]) -> Iterator[ObjectVersion]:
        """Yield the files below an open folder, then close it. Lookups are relative to the descriptor: replacing a link
        above the folder must not lead the listing elsewhere."""
        with closing_fd(folder):
            self.heartbeat()
            real = _path_of_fd(folder)
            if real in above:  # a link to a folder above: it would never end
                return
            if len(above) == _MAX_DEPTH:
                raise InvalidInput(
                    f"{above[0]}: folders below it lie more than {_MAX_DEPTH} deep in one another"
                )
            above = (*above, real)
            if not under(real, above[:1]) or not self._inside(real, path):
                raise _outside(path)
            with self._translating(SCHEME + path), os.scandir(folder) as entries:
                named = sorted(self._entries(entries, folder, path, above[0]), key=lambda each: each[0])
            for key, name, target in named:
                here = os.path.join(path, name)
                inner, found = -1, target
                if key.endswith(b"/") and is_named_folder(name):
                    yield ObjectVersion(SCHEME + _utf8(here) + "/", 0, "")
                    continue
                try:
                    if key.endswith(b"/"):
                        flags = _FOLDER if target else _FOLDER | os.O_NOFOLLOW
                        inner = os.open(name, flags, dir_fd=folder)
                    else:
                        found = target or os.stat(name, dir_fd=folder, follow_symlinks=False)
                except (
                    FileNotFoundError,
                    NotADirectoryError,
                ):  # removed or replaced since the folder was read
                    continue
                except OSError as error:
                    raise self._translated(error, SCHEME + here) from error
                if inner >= 0:
                    yield from self._list_folder(inner, here, above)
                elif found and stat.S_ISREG(found.st_mode) and not name.startswith(".nfs"):
                    yield _version(_utf8(here), found)

    def _entries(
        self, entries: Iterable[os.DirEntry[str]], folder: int, path: str, root: str
    ) -> Iterator[tuple[bytes, str, os.stat_result | None]]:
        """Yield the sort key and name of each entry, and the target's attributes of a link that stays below the root."""
        for entry in entries:
            self.heartbeat()
            target = None
            if entry.is_symlink():
                target = self._target(entry.name, folder, os.path.join(path, entry.name), root)
                if target is None:
                    continue
            is_folder = stat.S_ISDIR(target.st_mode) if target else entry.is_dir(follow_symlinks=False)
            if is_folder and entry.name.startswith(".") and not is_named_folder(entry.name):
                continue
            # "a-b" sorts before "a/b", so a folder's key ends with its slash.
            yield os.fsencode(entry.name) + b"/" * is_folder, entry.name, target

    def _translating(self, uri: str) -> translating:
        return translating(OSError, lambda error: self._translated(error, uri))

    def _target(self, name: str, folder: int, path: str, root: str) -> os.stat_result | None:
        """Return the attributes of a link's target; None for a dangling link, a cycle of links, or a target outside."""
        try:
            file = os.open(name, os.O_PATH | os.O_CLOEXEC, dir_fd=folder)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.ELOOP and under(_real(path), (root,)) and not is_ignored_folder(name):
                raise self._translated(error, SCHEME + path) from error
            return None
        with closing_fd(file):
            real = _path_of_fd(file)
            return os.fstat(file) if under(real, (root,)) and self._inside(real, path) else None

    def _check(self, opened: int, uri: str) -> None:
        if self.roots and not self._inside(_path_of_fd(opened), path_of(uri)):
            raise _outside(uri)

    def _inside(self, real: str, path: str) -> bool:
        """Tell whether the real path that `path` leads to lies under the same root as `path`."""
        if not self.roots:
            return True
        return under(real, self.roots) and _root(real, self.roots) == _root(path, self.roots)

    def _translated(self, error: OSError, uri: str) -> CacheError:
        """Translate an error. A path that leads outside gets the same error whether its target exists or not."""
        path = path_of(uri)
        if not self._inside(_real(path), path):
            return _outside(uri)
        return _translated(error, uri)


def path_of(uri: str) -> str:
    """Return the absolute path of a file URI or path. Raises InvalidInput."""
    path = uri.removeprefix(SCHEME)
    if not path.startswith("/") or "\0" in path:
        raise InvalidInput(f"not an absolute path: {uri!r}; write /path or file:///path")
    return path


def _real(path: str) -> str:
    """Resolve the links of a path; "" when they change meanwhile."""
    try:
        return os.path.realpath(path)
    except OSError:  # a link was removed meanwhile
        return ""


def under(path: str, roots: tuple[str, ...]) -> bool:
    """Tell whether `path` is one of `roots` or lies below one, by whole path segments."""
    return any(path == root or path.startswith(root.rstrip("/") + "/") for root in roots)


def _root(path: str, roots: tuple[str, ...]) -> str:
    """Return the innermost root of a path. Roots may be nested, and belong to different users."""
    return max((root for root in roots if under(path, (root,))), key=len, default="")


def _path_of_fd(opened: int) -> str:
    """Return the current real path of an open file or folder."""
    return os.readlink(f"/proc/self/fd/{opened}")


def _outside(uri: str) -> NotAllowed:
    return NotAllowed(f"{uri} leads outside what may be read")


def _version(path: str, found: Attributes) -> ObjectVersion:
    return ObjectVersion(SCHEME + path, found.st_size, etag_of(found))


def etag_of(found: Attributes) -> str:
    """Return the tag that tells versions of a file with the same size apart."""
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
    same_size = found.st_size == version.size_bytes
    if same_size and (not version.etag or etag_of(found) == version.etag):
        return
    if same_size and version.etag.startswith(f"{found.st_mtime_ns}-"):
        raise SourceChanged(
            f"only the ctime of {version.uri} changed since it was listed: its mode, owner or links were changed, or"
            " it was rewritten and its mtime set back; open the dataset again"
        )
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
