"""The dataset versions that this daemon knows: their catalogs on disk, and as sealed memfds for readers."""

from __future__ import annotations

import fcntl
import logging
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.unused import remove_unused, used
from cachesvc.config import Rule
from cachesvc.core.errors import CorruptData, NotAllowed, NotFound, OutOfSpace
from cachesvc.core.model import MAX_EXTENTS, DatasetId, ExtentId
from cachesvc.core.node.node import Node
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.tenants import Tenants
from cachesvc.sources.uri import Allowlist

log = logging.getLogger(__name__)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


UNUSED = 16
"""Catalogs that are loaded, though nobody uses them, for whoever comes next: each is two open files and a map."""
UNUSED_EXTENTS = MAX_EXTENTS
"""Of all those catalogs."""
CACHED_EXTENTS = 4 * MAX_EXTENTS
"""Of all catalogs that nobody claims, those of what is in part cached included: 1 GB."""
CLAIMED_EXTENTS = 9_000_000
"""Of all datasets that others than the daemon's user claim: 3 GB of records."""
TIDY_S = 60.0
"""Catalogs that go from the disk are looked for no more often."""


class Sealed:
    """A sealed catalog's descriptor, closed when the last who uses it lets go."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class Dataset:
    """One version: `sizes[i]` is the size in bytes of `extent_ids[i]`."""

    id: DatasetId
    catalog: Catalog
    sealed: Sealed
    extent_ids: tuple[ExtentId, ...]
    sizes: tuple[int, ...]
    extents: tuple[tuple[ExtentId, int], ...]
    """Ids with sizes, each once, as a claim names them: made once, off the loop."""
    index_of: dict[ExtentId, int]
    rules: frozenset[Rule]
    """Of its objects' prefixes: only a peer that all of them admit may learn that the dataset exists."""

    @property
    def catalog_fd(self) -> int:
        """Of the sealed catalog, as readers get it."""
        return self.sealed.fd

    @property
    def provisional(self) -> bool:
        """Extents without samples: of a dataset that is being indexed, or of what was one."""
        return not self.catalog.samples

    @property
    def size_bytes(self) -> int:
        """Decoded bytes of all extents."""
        return sum(self.sizes)

    def bytes_of(self, extents: Iterable[ExtentId]) -> int:
        """Decoded bytes of some of its extents."""
        return sum(self.sizes[self.index_of[extent]] for extent in extents)


class Datasets:
    """Catalogs live in `directory` as `<id>.lmdb` and survive the daemon; `load` runs off the event loop."""

    def __init__(
        self,
        directory: str,
        allowlist: Allowlist,
        tenants: Tenants,
        lookups: Lookups,
        executor: Executor,
        alone: bool = True,
    ) -> None:
        """Tidies the directory, unless another daemon is known to work there (not `alone`)."""
        self.directory = directory
        self._allowlist = allowlist
        self._tenants = tenants
        self._lookups = lookups
        self._executor = executor
        self._loaded: dict[DatasetId, Dataset] = {}
        self._loading: dict[DatasetId, Future[Dataset]] = {}
        self._lock = threading.Lock()
        self.claimed: Callable[[Dataset], bool] = lambda _: True
        self.used: Callable[[Dataset], bool] = lambda _: True
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._claim = tidied(directory, alone)
        self._tidy_at = 0.0

    def load(self, wanted: DatasetId) -> Future[Dataset]:
        """The dataset with that id, read once for all who ask meanwhile. Raises NotFound when no catalog is here or its
        source is no longer on the allowlist, CorruptData when the file is damaged, SourceUnavailable while it cannot
        be told what is allowed."""
        with self._lock:
            if wanted in self._loaded:
                ready: Future[Dataset] = Future()
                ready.set_result(self._loaded[wanted])
                return ready
            found = self._loading.get(wanted)
            if found is not None:
                return found
            found = self._loading[wanted] = self._executor.submit(self._read, wanted)
        # Kept by those who asked, until one admits it: they may be gone, or must not see it.
        found.add_done_callback(lambda _: self._loading.pop(wanted, None))
        return found

    def stored(self, wanted: DatasetId) -> bool:
        """Whether a catalog is here, also one that is not allowed now."""
        return re.fullmatch("[0-9a-f]{32}", wanted) is not None and os.path.exists(self._path(wanted))

    def admit(self, dataset: Dataset) -> Dataset:
        """Make a loaded dataset known, and forget those that nobody has used for longest; what `declare` and grants
        work with. On the event loop's thread."""
        with self._lock:
            known = self._loaded.pop(dataset.id, None)
            self._loaded[dataset.id] = known or dataset  # the latest is the last
            if known is not None:
                return known
        unclaimed = [each for each in self._loaded.values() if each is not dataset and not self.claimed(each)]
        for each in oldest(unclaimed, UNUSED, UNUSED_EXTENTS):  # to look at all would take long
            if not self.used(each):
                self._forget(each)
        unclaimed = [each for each in unclaimed if each.id in self._loaded]
        for each in oldest(unclaimed, len(unclaimed), CACHED_EXTENTS):
            self._forget(each)
        return dataset

    def _forget(self, dataset: Dataset) -> None:
        with self._lock:
            del self._loaded[dataset.id]  # who still has it can use it, and admit it again

    def home(self, extent: ExtentId) -> tuple[Dataset, int] | None:
        """A loaded dataset that has the extent, and its index there: of those that are indexed one that is claimed, if
        there is one, since fills count for it. O(datasets). On the event loop's thread."""
        having = [each for each in self._loaded.values() if extent in each.index_of]
        found = min(having, key=lambda each: (each.provisional, not self.claimed(each)), default=None)
        return (found, found.index_of[extent]) if found else None

    def known(self, wanted: DatasetId) -> Dataset | None:
        """The dataset if it is loaded."""
        return self._loaded.get(wanted)

    def all(self) -> list[Dataset]:
        """Every loaded dataset, in the order of loading."""
        return list(self._loaded.values())

    def tidy(self, pinned: Callable[[], Iterable[DatasetId]]) -> None:
        """Remove from disk, off the caller's thread, the catalogs that nobody has used for 30 days, or for longest
        where they take too much; those that are loaded or pinned stay."""
        now = time.monotonic()
        with self._lock:
            if now < self._tidy_at:
                return
            self._tidy_at = now + TIDY_S
        self._executor.submit(self._remove_unused, pinned)

    def close(self) -> None:
        """Give back the catalogs' descriptors."""
        self._loaded.clear()
        os.close(self._claim)

    def _path(self, wanted: DatasetId) -> str:
        return f"{self.directory}/{wanted}.lmdb"

    def _remove_unused(self, pinned: Callable[[], Iterable[DatasetId]]) -> None:
        try:
            with self._lock:
                kept = {*self._loaded, *self._loading}
            removed = remove_unused(self.directory, kept.union(pinned()))
        except OSError as error:
            log.warning("unused catalogs cannot be removed", extra={"error": str(error)})
            return
        if removed:
            log.info("catalogs that nobody used for long are removed", extra={"files": len(removed)})

    def _read(self, wanted: DatasetId) -> Dataset:
        if not self.stored(wanted) or not used(self._path(wanted)):
            raise unknown(wanted)
        sealed = Sealed(sealed_copy(self._path(wanted)))
        catalog = Catalog.open(f"/proc/self/fd/{sealed.fd}")
        self._lookups.run(lambda: self._check_allowed(wanted, catalog), catalog.uri)
        ids = tuple(catalog.extents())
        # Lists first: a tuple that grows stays young, and each young collection of garbage would walk all of it.
        sizes = tuple([int(size) for size in catalog.extent_sizes])
        index_of = {extent: index for index, extent in enumerate(ids)}
        rules = self._tenants.rules_of(
            _folder(catalog), (catalog.object(index).uri for index in range(catalog.objects))
        )
        # Step by step: one call about a million would keep the interpreter, and so the loop, from all else.
        pairs = enumerate(zip(ids, sizes))
        extents = tuple([pair for index, pair in pairs if index_of[pair[0]] == index])
        return Dataset(wanted, catalog, sealed, ids, sizes, extents, index_of, rules)

    def _check_allowed(self, wanted: DatasetId, catalog: Catalog) -> None:
        """The allowlist may have become narrower since the catalog was built: then whoever has its id is not told
        of its objects, nor of the prefixes that are allowed now. Raises NotFound, caused by the refusal."""
        if self._allowlist.holds(_folder(catalog)):
            return
        for index in range(catalog.objects):  # their common prefix is above what is allowed
            uri = catalog.object(index).uri
            if not self._allowlist.holds(uri):
                raise unknown(wanted) from NotAllowed(f"{uri} is not below an allowed prefix")


def oldest(unclaimed: Sequence[Dataset], most: int, most_extents: int) -> Iterator[Dataset]:
    """The first of them, until no more than so many, with so many extents together, are left."""
    extents = sum(len(each.sizes) for each in unclaimed)
    for count, each in zip(range(len(unclaimed), 0, -1), unclaimed, strict=True):
        if count <= most and extents <= most_extents:
            return
        extents -= len(each.sizes)
        yield each


def is_claimed(node: Node, dataset: Dataset) -> bool:
    """Whether a job or pin claims it."""
    return dataset.id in node.policy.shares.datasets


def check_share(node: Node, dataset: Dataset, user: int) -> None:
    """Raise OutOfSpace where a user would claim datasets of more extents than twice what that leaves free (see
    `daemon/control/call_quota.py`). The daemon's own claims what it wants; what somebody claims already costs no more."""
    claimed, own = node.policy.shares.datasets, os.geteuid()
    if user == own or dataset.id in claimed:
        return
    extents: Counter[int] = Counter()
    for each in claimed.values():
        extents[each.user] += len(each.extents)
    held, more = extents[user], len(dataset.sizes)
    if held + more > 2 * (CLAIMED_EXTENTS - extents.total() + extents[own] - more):
        raise OutOfSpace(
            f"user {user} reads datasets of {held:,} extents, and has no room for {more:,} more: close or unpin some,"
            " or open them with larger extents (extent_bytes=)"
        )


def in_use(node: Node, dataset: Dataset) -> bool:
    """Whether the node has any of its extents: resident, filling or asked for. O(the fewer of them)."""
    wanted = dataset.index_of.keys()
    found = (tier.dormant.keys() for tier in node.policy.tiers.values())
    return not (node.copies.entries.keys().isdisjoint(wanted) and all(map(wanted.isdisjoint, found)))


def unknown(wanted: DatasetId) -> NotFound:
    """The same for what is not there and for what the caller may not see."""
    return NotFound(f"dataset {wanted} is not known here; open it by its URI")


def _folder(catalog: Catalog) -> str:
    return catalog.uri_prefix.rpartition("/")[0] + "/"


def tidied(directory: str, alone: bool) -> int:
    """Remove what a daemon that was killed left among the catalogs, unless another daemon works there (known to
    where not `alone`): unfinished files, catalogs without samples (of datasets being indexed), damaged
    ones and those of other releases; folders stay, as somebody else's.
    Returns a descriptor that claims the directory while it is open."""
    claim = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if alone:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for found in list(os.scandir(directory)) if alone else ():
            if not found.is_dir(follow_symlinks=False) and (wrong := _wrong(found)):
                log.info(
                    "a catalog that cannot be used is removed", extra={"file": found.name, "error": wrong}
                )
                os.unlink(found)
    except BlockingIOError:
        log.warning("another daemon uses the same catalogs", extra={"directory": directory})
    fcntl.flock(claim, fcntl.LOCK_SH)
    return claim


def _wrong(found: os.DirEntry[str]) -> str:
    """What is wrong with a file among catalogs; "" for a good one."""
    if not found.name.endswith(".lmdb") or not found.is_file(follow_symlinks=False):
        return "unfinished"
    try:
        return "" if Catalog.open(found.path).samples > 0 else "not indexed to its end"
    except CorruptData as error:  # of another release, perhaps
        return str(error.__cause__ or error)


def sealed_copy(path: str) -> int:
    """A file's bytes in a sealed memfd: what is validated once can then not change under its readers."""
    memory = os.memfd_create(os.path.basename(path), os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with open(path, "rb") as file:
        remaining = os.fstat(file.fileno()).st_size
        while remaining > 0:
            sent = os.sendfile(memory, file.fileno(), None, remaining)
            if sent == 0:
                break
            remaining -= sent
    fcntl.fcntl(memory, fcntl.F_ADD_SEALS, _SEALS)
    readable = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY | os.O_CLOEXEC)
    os.close(memory)
    return readable
