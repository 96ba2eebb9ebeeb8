"""Snapshots: the files below one URI at one time, and their bytes, which never change. Finds the one that a file is read
from, and keeps those that were used last.

A file that is opened by its name is a dataset of its own. A folder that was listed is one dataset, in which each file has
extents of its own, the same ones: a read fetches nothing of another file. Both are of `format="objects"`. Where a program
names its `folder`, it says that it reads all of it: that is a dataset of `format="files"`, whose small files share extents.
The daemon's allowlist, tenants, quotas and pins apply as they do for `open_dataset`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple, NoReturn
from weakref import WeakValueDictionary

import numpy as np

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.object_ranges import range_of
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.opening import Opened, open_by_policy, policy, read_timeout_s
from cachesvc.config_files import own_sections
from cachesvc.core.errors import (
    CacheError,
    DaemonUnavailable,
    InvalidInput,
    NotAllowed,
    NotFound,
    OutOfSpace,
    TierFailed,
)
from cachesvc.core.model import DatasetId, ObjectVersion
from cachesvc.core.safe_text import redacted
from cachesvc.gateway.leased_reads import LeasedReads
from cachesvc.gateway.urls import opens_by_name, stripped
from cachesvc.sources.ignored import is_ignored
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.sources.source import Source
from cachesvc.sources.uri import WEB, canonical, local_path
from cachesvc.system.fork_hooks import abandon_in_children

FRESH_S = 10.0
"""Time after which a snapshot is compared with the source again. The daemon answers from a listing of up to 30 s."""
MAX_SNAPSHOTS = 32
"""Each may have a connection to the daemon."""
_OPTIONS = Options(format="objects", split="all")
_TOGETHER = Options(format="files", labels="none", split="all")
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
        self.root, self.files, self._sources, self.leased, self.direct = root, files, sources, leased, direct
        self.sharing: tuple[LeasedReads, ...] = ()
        """Reads of datasets in use, whose extents may hold bytes of these files: the node then has them once."""
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
        done = self._read_shared(file.version, offset, into)
        offset, into = offset + done, into[done:]
        while len(into):
            if self.leased is not None:
                try:
                    return self.leased.read_into(file.address + offset, into, wait=not self.direct)
                except (DaemonUnavailable, OutOfSpace, TierFailed) as error:
                    if not self.direct:
                        raise
                    _log.warning(
                        "%s: reading %s directly from the source", str(error), redacted(file.version.uri)
                    )
            try:
                return self._sources(file.version.uri).read_into(file.version, offset, into)
            except NotAllowed:
                if self.leased is None:
                    raise
                self.direct = False  # this process has no credentials: wait for the daemon

    def _read_shared(self, version: ObjectVersion, offset: int, into: memoryview) -> int:
        """Read from the extents of datasets in use, as far as they have the bytes. Return how many were read. A dataset
        that fails is left out until the next comparison with the source."""
        done = 0
        for reads in self.sharing:
            try:
                while done < len(into) and (held := range_of(reads.catalog, version, offset + done)):
                    skipped = offset + done - held.begin
                    part = into[done : done + held.end - held.begin - skipped]
                    address = int(reads.catalog.extent_starts[held.extent]) + held.at + skipped
                    reads.read_into(address, part, wait=False)
                    done += len(part)
            except CacheError as error:
                _log.info("not reading the extents of %s: %s", redacted(reads.catalog.uri), error)
                self.sharing = tuple(each for each in self.sharing if each is not reads)
        return done

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


@dataclass(slots=True)
class _Kept:
    snapshot: Snapshot
    checked_at: float
    stale: bool
    """Whether the source was down then, and the snapshot is one from before."""


class Snapshots:
    """The snapshots of a file system. Safe to share between threads; a forked child opens its own."""

    def __init__(self, folder: str = "", options: Options = _OPTIONS) -> None:
        """`folder`: the URI of a folder whose files are read from one snapshot, listed or not; "" for none. `options`: of
        the datasets of all other files and folders, in whose format each file is a sample."""
        self._folder, self._options = folder, options
        self._sources = Sources(SourceSettings(sections=own_sections()))
        self._kept: OrderedDict[str, _Kept] = OrderedDict()
        self._reads: WeakValueDictionary[DatasetId, LeasedReads] = WeakValueDictionary()
        """Those that snapshots share."""
        self._refresh = False
        self._said = False
        self._lock = threading.RLock()
        abandon_in_children(self)

    def of(self, uri: str) -> tuple[Snapshot, str]:
        """Return a snapshot that holds the file or the folder `uri`, and its path there. Raises NotFound, and what opening
        a dataset raises."""
        if self._folder and self._folder not in self._kept and uri.startswith(f"{self._folder}/"):
            self._open(self._folder)
        for root in _roots(uri):
            snapshot, path = self._fresh(root), uri[len(root.rstrip("/")) + 1 :]
            if snapshot is not None and snapshot.has(path):
                return snapshot, path
            if snapshot is not None and snapshot.is_folder and not is_ignored(path):
                raise NotFound(f"{uri} does not exist")
        if {".", ".."}.intersection(uri.split("/")):
            canonical(uri)  # raises
        if opens_by_name(uri):
            return self._open(uri), ""
        folder = next(filter(opens_by_name, _and_parents(uri)), "")
        if not folder:
            raise InvalidInput(f"{uri} holds marks of patterns in the name of its folder: rename it")
        path = uri[len(folder) + 1 :]
        snapshot = self._open(f"{folder}/" if _may_be_both(folder) else folder)
        if not snapshot.has(path):
            raise NotFound(f"{uri} does not exist")
        return snapshot, path

    def file(self, uri: str) -> tuple[Snapshot, SnapshotFile]:
        """Return a file and a snapshot that it lies in. Raises as `of`, and IsADirectoryError."""
        snapshot, below = self.of(uri)
        if below not in snapshot.files:
            raise IsADirectoryError(redacted(f"{stripped(uri)} is a folder"))
        return snapshot, snapshot.files[below]

    def folder_of(self, uri: str) -> Snapshot | None:
        """Return the folder of the name of an object, in a bucket, which may have both; None without one."""
        if not _may_be_both(uri):
            return None
        try:
            return self._fresh(f"{uri}/") or self._open(f"{uri}/")
        except (NotFound, NotAllowed):
            return None

    def forget(self) -> None:
        """Open every snapshot anew at its next use, and have the daemon list the source anew for it."""
        with self._lock:
            self._kept.clear()
            self._refresh = True

    def abandon(self) -> None:
        """Forget the parent's state in a forked child. See `Abandoned`; the snapshots abandon theirs."""
        self._lock = threading.RLock()
        self._sources = Sources(SourceSettings(sections=own_sections()))
        self._kept.clear()
        self._reads = WeakValueDictionary()

    def _fresh(self, root: str) -> Snapshot | None:
        """Return the kept snapshot, or the next one if the source has changed; None for none, or where nothing is left."""
        with self._lock:
            kept = self._kept.get(root)
            if kept is None:
                return None
            self._kept.move_to_end(root)
            if time.monotonic() - kept.checked_at < FRESH_S:
                return kept.snapshot
        try:
            return self._open(root)
        except NotFound:
            with self._lock:
                self._kept.pop(root, None)
            return None

    def _open(self, uri: str) -> Snapshot:
        """Open a snapshot and keep it. Threads open side by side, so two may open the same one."""
        before = self._kept.get(uri)
        warned = before is not None and before.stale
        options = _TOGETHER if uri == self._folder else self._options
        opened = open_by_policy([uri], options, "", 1, self._refresh and before is None)
        stale = opened is not None and bool(opened.stale)
        if opened is not None and stale and not warned:
            _log.warning("%s", opened.stale)
        if opened is None:
            snapshot = self._list(uri)
        elif before is not None and before.snapshot.id == opened.id:
            snapshot = before.snapshot
        else:
            snapshot = self._leased(uri, options, opened)
        if opened is not None:
            snapshot.sharing = tuple(self._shared(opened))
        with self._lock:
            self._kept[uri] = _Kept(snapshot, time.monotonic(), stale)
            while len(self._kept) > MAX_SNAPSHOTS:
                self._kept.popitem(last=False)
        return snapshot

    def _list(self, uri: str) -> Snapshot:
        if policy(1)[0] != "off" and local_path(uri) is None and not self._said:
            self._said = True
            _log.warning("no daemon: reading straight from the source; start one: cachesvc serve")
        files = files_listed(uri, self._sources(uri).list(uri))
        if not files:
            raise NotFound(f"{uri} does not exist, or holds no data")
        return Snapshot(uri, files, self._sources)

    def _shared(self, opened: Opened) -> Iterator[LeasedReads]:
        def ended(_: int) -> NoReturn:
            raise NotFound("its job has ended")

        for dataset in opened.sharing:
            reads = self._reads.get(dataset)
            if reads is None:
                try:
                    reads = LeasedReads(opened.directory, dataset, ended, read_timeout_s(), claims=False)
                except CacheError as error:
                    _log.info("not reading the extents of dataset %s: %s", dataset, error)
                    continue
                self._reads[dataset] = reads
            yield reads

    def _leased(self, uri: str, options: Options, opened: Opened) -> Snapshot:
        def open_again(extent_bytes: int) -> None:
            with Control(opened.directory) as control:
                control.open_dataset([uri], replace(options, extent_bytes=extent_bytes), opened.id)

        leased = LeasedReads(opened.directory, opened.id, open_again, read_timeout_s())
        return Snapshot(uri, files_of(leased.catalog), self._sources, leased, opened.direct)


def _may_be_both(uri: str) -> bool:
    """Tell whether an object and a folder can have one name, as in a bucket."""
    return local_path(uri) is None and not uri.startswith((*WEB, "hf://"))


def _and_parents(uri: str) -> Iterator[str]:
    """Yield a URI and the folders that it lies in, the nearest first."""
    while "://" in uri:
        yield uri
        uri = uri.rpartition("/")[0].rstrip("/")


def _roots(uri: str) -> Iterator[str]:
    """Yield the URIs of snapshots that may hold a file or folder. A folder beside an object of its name ends in a slash."""
    yield uri
    for folder in islice(_and_parents(uri), 1, None):
        yield f"{folder}/"
        yield folder
