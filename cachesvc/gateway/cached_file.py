"""A file as programs read it: buffered, seekable, read-only, and of one version from its opening to its end."""

from __future__ import annotations

import io
import os
from typing import TYPE_CHECKING, Any

from cachesvc.core.errors import SourceChanged
from cachesvc.gateway.snapshot import Snapshot, SnapshotFile

if TYPE_CHECKING:
    from cachesvc.gateway.filesystem import CachedFileSystem


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
