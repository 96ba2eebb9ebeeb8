"""A snapshot: the files below one URI at one time, and their bytes, which never change."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.errors import DaemonUnavailable, NotAllowed, OutOfSpace, TierFailed
from cachesvc.core.model import ObjectVersion
from cachesvc.core.safe_text import redacted
from cachesvc.gateway.leased_reads import LeasedReads
from cachesvc.sources.ignored import is_ignored
from cachesvc.sources.source import Source

_log = logging.getLogger("cachesvc")


class SnapshotFile(NamedTuple):
    """One file: its version, and the address of its first byte in the catalog; -1 without a daemon."""

    version: ObjectVersion
    address: int


class Snapshot:
    """The files below `root`, by their path below it: "" for `root` itself, where that is a file. Safe to share between
    threads."""

    def __init__(
        self,
        root: str,
        files: dict[str, SnapshotFile],
        sources: Callable[[str], Source],
        leased: LeasedReads | None = None,
        direct: bool = True,
    ) -> None:
        """`leased`: the reads through the daemon. `direct`: the source may be read while the daemon is gone or has no
        room."""
        self.root, self.files, self._sources, self.leased, self._direct = root, files, sources, leased, direct
        self.seen_at = time.time()
        self.folders = _folders(files)
        """The names directly below each folder, by its path below the root."""

    @property
    def id(self) -> str:
        """The dataset version that a daemon serves; "" without a daemon."""
        return "" if self.leased is None else str(self.leased.dataset)

    @property
    def is_folder(self) -> bool:
        """False for one file that was opened by its name."""
        return "" not in self.files

    def has(self, path: str) -> bool:
        """Tell whether there is such a file or folder."""
        return path in self.files or path in self.folders

    def read_into(self, file: SnapshotFile, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes of a file from `offset` on, all of which lie in it.

        Raises SourceChanged where the source is read and has another version, and what opening and reading a dataset
        raises.
        """
        while len(into):
            if self.leased is not None:
                try:
                    return self.leased.read_into(file.address + offset, into, wait=not self._direct)
                except (DaemonUnavailable, OutOfSpace, TierFailed) as error:
                    if not self._direct:
                        raise
                    _log.warning(
                        "%s: reading %s directly from the source", str(error), redacted(file.version.uri)
                    )
            try:
                return self._sources(file.version.uri).read_into(file.version, offset, into)
            except NotAllowed:
                if self.leased is None:
                    raise
                self._direct = False  # this process has no credentials: wait for the daemon

    def read(self, file: SnapshotFile, offset: int, size_bytes: int) -> bytes:
        """Return the bytes [offset, offset + size_bytes) of a file. Raises as `read_into`."""
        found = bytearray(size_bytes)
        self.read_into(file, offset, memoryview(found))
        return bytes(found)


def files_of(catalog: Catalog) -> dict[str, SnapshotFile]:
    """Return the files of a catalog whose pieces are plain parts of objects, by their path below its URI."""
    columns, root = catalog.columns, str(catalog.columns.head["uri"]).rstrip("/")
    first, lengths = columns["extent.piece"], columns["piece.length"]
    ends = np.cumsum(lengths)
    before = ends - lengths
    extent = np.repeat(np.arange(len(first) - 1), np.diff(first))
    begins = catalog.extent_starts[extent] + before - before[first[:-1]][extent]
    addresses = np.zeros(catalog.objects, np.int64)
    heads = columns["piece.offset"] == 0
    addresses[columns["piece.object"][heads]] = begins[heads]
    versions = (catalog.object(index) for index in range(catalog.objects))
    return _by_path(root, zip(versions, addresses.tolist()))


def files_listed(root: str, versions: Iterable[ObjectVersion]) -> dict[str, SnapshotFile]:
    """Return the files of a source's listing of `root`, without those that datasets leave out."""
    found = _by_path(root.rstrip("/"), ((version, -1) for version in versions))
    return {path: file for path, file in found.items() if not path or not is_ignored(path)}


def _by_path(root: str, versions: Iterable[tuple[ObjectVersion, int]]) -> dict[str, SnapshotFile]:
    found = {}
    for version, address in versions:
        if version.uri == root:
            found[""] = SnapshotFile(version, address)
        elif version.uri.startswith(f"{root}/") and (path := version.uri[len(root) + 1 :]):
            found[path] = SnapshotFile(version, address)
    return found


def split_path(path: str) -> tuple[str, str]:
    """Split a path into its folder and its name there. The name of `a//b` in `a` is `/b`: no folder has an empty name."""
    folder = path[: max(0, path.rfind("/"))].rstrip("/")
    return folder, path[len(folder) + 1 :] if folder else path


def _folders(files: Iterable[str]) -> dict[str, set[str]]:
    folders: dict[str, set[str]] = {"": set()}
    for path in files:
        while path:
            folder, name = split_path(path)
            names = folders.setdefault(folder, set())
            if name in names:
                break
            names.add(name)
            path = folder
    return folders
