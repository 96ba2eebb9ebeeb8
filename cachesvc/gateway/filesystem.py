"""The fsspec file system `cachesvc://`, which reads files through the node's cache. `urls.py` states the URLs."""

from __future__ import annotations

import hashlib
from typing import Any, NoReturn

from fsspec import AbstractFileSystem

from cachesvc.core.errors import NotAllowed, NotFound
from cachesvc.core.safe_text import redacted
from cachesvc.gateway.cached_file import CachedFile
from cachesvc.gateway.snapshot import Snapshot, SnapshotFile
from cachesvc.gateway.snapshots import Snapshots
from cachesvc.gateway.urls import PROTOCOL, path_of, stripped, uri_of
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
        return stripped(_text(path).removeprefix(f"{PROTOCOL}::"))

    def unstrip_protocol(self, name: str) -> str:
        """Return the URL of a path."""
        return f"{PROTOCOL}://{path_of(self._uri(name))}"

    def _uri(self, path: str) -> str:
        found = self._strip_protocol(path) or stripped(self._only)
        return uri_of(
            found if found.startswith(self._prefix) and not self._only else f"{self._prefix}{found}"
        )

    def file(self, path: str) -> tuple[Snapshot, SnapshotFile]:
        """Return a file and the snapshot that it lies in. Raises NotFound, IsADirectoryError, and what opening a dataset
        raises."""
        snapshot, below = self._snapshots.of(self._uri(path))
        if below not in snapshot.files:
            raise IsADirectoryError(redacted(f"{path} is a folder"))
        return snapshot, snapshot.files[below]

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder, or the one file of this name. Everything below the folder is listed once, as it is for a
        dataset; hidden files, and those that datasets leave out as litter, are not in it."""
        snapshot, below = self._snapshots.of(self._uri(path))
        base = self._strip_protocol(path) or stripped(self._only)
        if below in snapshot.files:
            found = [_details(snapshot, below, base)]
        else:
            prefix = f"{below}/" if below else ""
            found = [
                _details(snapshot, f"{prefix}{name}", f"{base}/{name}")
                for name in sorted(snapshot.folders[below])
            ]
        return found if detail else [each["name"] for each in found]

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
        """Forget what was listed, here and in the daemon."""
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
        return {"name": name, "size": 0, "type": "directory"}
    version = file.version
    return {
        "name": name,
        "size": version.size_bytes,
        "type": "file",
        "ETag": version.etag,
        "uri": version.uri,
    }


def _text(path: Any) -> str:
    return path if isinstance(path, str) else path.__fspath__()
