"""The fsspec file system `cachesvc://`, which reads files through the node's cache. `urls.py` states the URLs.

A file is buffered, seekable, read-only, and of one version from its opening to its end.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from itertools import accumulate
from typing import Any, NoReturn

from fsspec import AbstractFileSystem

from cachesvc.core.errors import InvalidInput, NotAllowed, NotFound, SourceChanged
from cachesvc.gateway.snapshots import Snapshot, SnapshotFile, Snapshots
from cachesvc.gateway.urls import PROTOCOL, stripped, uri_of
from cachesvc.sources.uri import local_path

try:
    from fsspec.implementations.chained import ChainedFileSystem
except ImportError:  # an older fsspec, which gives the rest of a chain as `fo`
    ChainedFileSystem = AbstractFileSystem

CACHED_BUFFER_BYTES = 128 << 10
"""The buffer of a file whose bytes are on this node: it saves calls, and a seek costs nothing."""
REMOTE_BUFFER_BYTES = 4 << 20
"""The buffer of a file that is read from its source: each refill is a request."""
_WHOLE_URLS = ("", "file", "local", "http", "https")
"""Protocols whose paths, in a chain, still say what they are."""


class _RawFile(io.RawIOBase):
    """Reads without a buffer."""

    mode = "rb"

    def __init__(self, snapshot: Snapshot, file: SnapshotFile, name: str) -> None:
        self._snapshot, self._file, self._at = snapshot, file, 0
        self.name = name

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.version.size_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"negative seek position {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        into = memoryview(buffer).cast("B")
        into = into[: max(0, self._file.version.size_bytes - self._at)]
        self._snapshot.read_into(self._file, self._at, into)
        self._at += len(into)
        return len(into)

    def readall(self) -> bytes:
        left = max(0, self._file.version.size_bytes - self._at)
        found = self._snapshot.read(self._file, self._at, left)
        self._at += left
        return found


class CachedFile(io.BufferedReader):
    """An open file. Picklable: the copy reads on at the same place, and raises SourceChanged where the file has another
    version by then."""

    def __init__(
        self, fs: CachedFileSystem, path: str, snapshot: Snapshot, file: SnapshotFile, buffer_bytes: int
    ) -> None:
        super().__init__(_RawFile(snapshot, file, path), buffer_bytes)
        self.fs, self.path, self.full_name, self._file, self._buffer_bytes = (
            fs,
            path,
            path,
            file,
            buffer_bytes,
        )
        self.size = file.version.size_bytes
        self.blocksize = buffer_bytes

    @property
    def closed(self) -> bool:
        """True once it is closed. Chains such as `blockcache::` set it, after they have closed the file."""
        return super().closed

    @closed.setter
    def closed(self, closed: bool) -> None:
        if closed:
            self.close()

    def _fetch_range(self, start: int, end: int) -> bytes:
        """Return a range, for such chains."""
        return self.fs.cat_file(self.path, start, end)

    @property
    def details(self) -> dict[str, Any]:
        """The file's entry, as `info` returns it."""
        return dict(self.fs.info(self.path))

    def __reduce__(self) -> tuple[Any, ...]:
        return _open_again, (self.fs, self.path, self._file.version, self._buffer_bytes, self.tell())


def _open_again(fs: CachedFileSystem, path: str, version: Any, buffer_bytes: int, at: int) -> CachedFile:
    snapshot, file = fs.file(path)
    if file.version != version:
        raise SourceChanged(f"{version.uri} was overwritten: open it again")
    found = CachedFile(fs, path, snapshot, file, buffer_bytes)
    found.seek(at)
    return found


class CachedFileSystem(ChainedFileSystem):  # type: ignore[misc]
    """Files of any source that datasets are read from, through the daemon where there is one (CACHESVC). Read-only.

    Errors are those of `open_dataset`: NotFound is a FileNotFoundError, NotAllowed a PermissionError. A file is of one
    version while it is open. What was listed is compared with the source after ten seconds, and at once after
    `invalidate_cache`.
    """

    protocol = PROTOCOL
    root_marker = ""
    sep = "/"

    def __init__(self, folder: str = "", target_protocol: str = "", fo: str = "", **options: Any) -> None:
        """`folder`: a folder of many small files, which are then read from one dataset even if nobody lists it.
        `target_protocol` and `fo` come from a chain, `cachesvc::s3://bucket/key`."""
        super().__init__(**options)
        self._prefix = "" if target_protocol in _WHOLE_URLS else f"{target_protocol}/"
        self._only = fo
        self._snapshots = Snapshots(uri_of(stripped(folder)) if folder else "")

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return stripped(os.fspath(path).removeprefix(f"{PROTOCOL}::"))

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path."""
        return f"{PROTOCOL}://{stripped(self._uri(name))}"

    def _uri(self, path: str) -> str:
        stripped_path = self._strip_protocol(path) or stripped(self._only)
        return uri_of(
            stripped_path
            if stripped_path.startswith(self._prefix) and not self._only
            else f"{self._prefix}{stripped_path}"
        )

    def file(self, path: str) -> tuple[Snapshot, SnapshotFile]:
        """Return a file and the snapshot that it lies in. Raises NotFound, IsADirectoryError, and what opening a dataset
        raises."""
        return self._snapshots.file(self._uri(path))

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder, or the one file of this name where no folder has it, too. Everything below the folder is listed
        once, as it is for a dataset; hidden files, and those that datasets leave out as litter, are not in it.

        An object and a folder of one name are two entries. No folder has an empty name: `a//b` is in `a`, under `/b`.
        """
        snapshot, below = self._snapshots.of(self._uri(path))
        base = self._strip_protocol(path) or stripped(self._only)
        if not snapshot.is_folder and (beside := self._snapshots.folder_of(snapshot.root)):
            snapshot, below = beside, ""
        if not snapshot.folders.get(below):
            rows = [_details(snapshot, below, base)]
        else:
            prefix, rows = f"{below}/" if below else "", []
            for name in sorted(snapshot.folders[below]):
                child, shown = f"{prefix}{name}", f"{base}/{name}"
                if child in snapshot.files:
                    rows.append(_details(snapshot, child, shown))
                if child in snapshot.folders:
                    rows.append(_folder(shown))
        return rows if detail else list(dict.fromkeys(each["name"] for each in rows))

    def walk(
        self,
        path: str,
        maxdepth: int | None = None,
        topdown: bool = True,
        on_error: str | Callable[[OSError], object] = "omit",
        detail: bool = False,
        **_: Any,
    ) -> Iterator[tuple[str, Any, Any]]:
        """Yield each folder from `path` on, with the names of its folders and files. fsspec's own takes the last segment
        of a path as its name, which `a/b` and `a//b` share."""
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        path = self._strip_protocol(path)
        try:
            entries = self.ls(path)
        except OSError as error:
            if on_error == "raise":
                raise
            if callable(on_error):
                on_error(error)
            return
        folders: dict[str, dict[str, Any]] = {}
        files: dict[str, dict[str, Any]] = {}
        for entry in entries:
            into = folders if entry["type"] == "directory" else files
            into[entry["name"][len(path) + 1 :]] = entry
        level: tuple[str, Any, Any] = (path, folders, files)
        if not detail:
            level = (path, list(folders), list(files))
        if topdown:
            yield level
        if maxdepth is None or maxdepth > 1:
            for name in list(level[1]):  # the caller may have removed some
                deeper = maxdepth and maxdepth - 1
                yield from self.walk(f"{path}/{name}", deeper, topdown, on_error, detail)
        if not topdown:
            yield level

    def get(self, rpath: Any, lpath: Any, recursive: bool = False, *more: Any, **options: Any) -> None:
        """Copy files to a local folder. Raises InvalidInput for objects whose local paths would be one file, or a file and
        a folder."""
        if recursive and isinstance(rpath, str):
            check_copies(self.find(rpath))
        super().get(rpath, lpath, recursive, *more, **options)

    def modified(self, path: str) -> datetime:
        """Return when a local file was modified. Listings of other sources keep no times, so it is the time when this
        process first saw the version, which comes later and changes with the version."""
        snapshot, file = self.file(path)
        local = local_path(file.version.uri) is not None
        seconds = int(file.version.etag.partition("-")[0]) / 1e9 if local else snapshot.seen_at
        return datetime.fromtimestamp(seconds, timezone.utc)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return name, size in bytes, type, and for a file its ETag and URI. Raises NotFound."""
        snapshot, below = self._snapshots.of(self._uri(path))
        return _details(snapshot, below, self._strip_protocol(path) or stripped(self._only))

    def exists(self, path: str, **_: Any) -> bool:
        """Tell whether there is such a file or folder. Raises all errors but NotFound."""
        try:
            self.info(path)
        except NotFound:
            return False
        return True

    def ukey(self, path: str) -> str:
        """Return a digest that changes with the file."""
        _, file = self.file(path)
        return hashlib.blake2b(repr(file.version).encode(), digest_size=16).hexdigest()

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return the bytes from `start` to `end`, which may be negative, as a slice does."""
        snapshot, file = self.file(path)
        begin, stop, _step = slice(start, end).indices(file.version.size_bytes)
        return snapshot.read(file, begin, max(0, stop - begin))

    def invalidate_cache(self, path: str | None = None) -> None:
        """Forget the listings, here and in the daemon."""
        self._snapshots.forget()

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> CachedFile:
        if mode != "rb":
            self._refuse(path)
        snapshot, file = self.file(path)
        near = snapshot.leased is not None or local_path(file.version.uri) is not None
        buffer_bytes = CACHED_BUFFER_BYTES if near else block_size or REMOTE_BUFFER_BYTES
        return CachedFile(self, path, snapshot, file, buffer_bytes)

    def _refuse(self, *args: Any, **_: Any) -> NoReturn:
        """Raise NotAllowed."""
        name = f": write {args[0]} at its source" if args and isinstance(args[0], str) else ""
        raise NotAllowed(f"{PROTOCOL}:// is read-only{name}")

    mkdir = makedirs = mkdirs = rmdir = rm = rm_file = _rm = delete = touch = _refuse
    put = put_file = upload = pipe = pipe_file = cp_file = copy = cp = mv = move = rename = _refuse


def _details(snapshot: Snapshot, below: str, name: str) -> dict[str, Any]:
    file = snapshot.files.get(below)
    if file is None:
        return _folder(name)
    version = file.version
    return {
        "name": name,
        "size": version.size_bytes,
        "type": "file",
        "ETag": version.etag,
        "uri": version.uri,
    }


def _folder(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


def check_copies(names: list[str]) -> None:
    """Raise InvalidInput for names that would be one local path, or a file in the place of a folder."""
    local: dict[str, str] = {}
    for name in names:
        one = local.setdefault(re.sub("/+", "/", name), name)
        if one != name:
            raise InvalidInput(f"{one} and {name} would be one local file: get them by name, each to its own")
    for path, name in local.items():
        parents = accumulate(path.split("/")[:-1], lambda above, below: f"{above}/{below}")
        if folder := next(filter(local.__contains__, parents), ""):
            raise InvalidInput(
                f"{local[folder]} would be a local file and the folder of {name}: get them by name"
            )
