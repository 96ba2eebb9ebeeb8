"""The dataset versions that this daemon serves: their catalogs on disk, and sealed memfds of them for readers."""

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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.expiry import mark_used, remove_unused
from cachesvc.catalog.layout import Prepared
from cachesvc.catalog.prepared import PreparedForm, Recipe, derive, origin_of
from cachesvc.config import Rule
from cachesvc.core.errors import CorruptData, NotAllowed, NotFound
from cachesvc.core.model import MAX_EXTENTS, DatasetId, ExtentId, SourceExtent
from cachesvc.daemon.access.path_lookups import Lookups
from cachesvc.daemon.access.tenants import Tenants

log = logging.getLogger(__name__)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL


MAX_UNUSED = 16
"""Loaded catalogs without users, kept for the next opening; each is two open files and a mapping."""
MAX_UNUSED_EXTENTS = MAX_EXTENTS
"""Extents of all loaded catalogs without users."""
MAX_CACHED_EXTENTS = 4 * MAX_EXTENTS
"""Extents of all loaded catalogs without claims, including those with cached extents: 1 GB."""
TIDY_S = 60.0
"""The shortest interval between searches for unused catalogs on disk."""


class SealedCatalog:
    """The descriptor of a sealed catalog, closed with the last reference."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


@dataclass(frozen=True, slots=True)
class ServedDataset:
    """A loaded dataset version; `sizes[i]` is the size in bytes of `extent_ids[i]`."""

    id: DatasetId
    catalog: Catalog
    sealed: SealedCatalog
    extent_ids: tuple[ExtentId, ...]
    sizes: tuple[int, ...]
    extents: tuple[tuple[ExtentId, int], ...]
    """Distinct ids with sizes in bytes, as a claim lists them; made once, off the event loop."""
    index_of: dict[ExtentId, int]
    rules: frozenset[Rule]
    """Rules of its objects' prefixes, and of the user who prepared it. Only users that all of them admit may learn that the
    dataset exists."""
    source: ServedDataset | None = None
    """The dataset that this one is prepared from."""
    made_from: tuple[SourceExtent, ...] = ()
    """The source extent of each of a prepared dataset's `extents`."""

    @property
    def catalog_fd(self) -> int:
        """The descriptor of the sealed catalog, which readers get."""
        return self.sealed.fd

    @property
    def provisional(self) -> bool:
        """True for extents without samples, which a builder declares while it indexes a dataset."""
        return not self.catalog.samples

    @property
    def uneven(self) -> bool:
        """True where `sizes` are the most that its extents may take."""
        return isinstance(self.catalog.layout, Prepared) and self.catalog.layout.most_bytes > 0

    @property
    def is_one_file(self) -> bool:
        """True for a file that a program opened by its name (`gateway/`), of which there may be thousands."""
        return self.catalog.format in ("objects", "whole") and self.catalog.objects == 1

    @property
    def sample_bytes(self) -> int:
        """The mean size of a sample; 0 without samples."""
        return self.size_bytes // self.catalog.samples if self.catalog.samples else 0

    @property
    def size_bytes(self) -> int:
        """Decoded bytes of all extents."""
        return sum(self.sizes)

    def bytes_of(self, extents: Iterable[ExtentId], sizes: Sequence[int] = ()) -> int:
        """Decoded bytes of some of its extents. `sizes`: what they take, where that differs."""
        return sum((sizes or self.sizes)[self.index_of[extent]] for extent in extents)


class Datasets:
    """Catalogs are stored in `directory` as `<id>.lmdb` and survive the daemon; `load` runs off the event loop."""

    def __init__(
        self,
        directory: str,
        tenants: Tenants,
        lookups: Lookups,
        executor: Executor,
    ) -> None:
        """Remove unusable files from the directory, unless another daemon uses it."""
        self.directory = directory
        self._tenants = tenants
        self._lookups = lookups
        self._executor = executor
        self._loaded: dict[DatasetId, ServedDataset] = {}
        self._loading: dict[DatasetId, Future[ServedDataset]] = {}
        self._withdrawn: frozenset[DatasetId] = frozenset()
        """Loaded datasets that were allowed once. Their readers go on, and there are no new ones."""
        self._lock = threading.Lock()
        self._deriving = threading.Lock()
        self.stale: dict[DatasetId, int] = {}
        """Datasets whose source was down at the last opening, and when it was listed before. On the event loop's thread."""
        self.stale_openings = 0
        self.undeclared: Callable[[ExtentId], tuple[ServedDataset, int] | None] = lambda _: None
        """Finds what stands for a dataset of an extent that none declares."""
        self.claimed: Callable[[ServedDataset], bool] = lambda _: True
        self.used: Callable[[ServedDataset], bool] = lambda _: True
        Path(directory).mkdir(parents=True, exist_ok=True)
        self._claim = claim_directory(directory)
        self._tidy_at = 0.0

    def load(self, wanted: DatasetId) -> Future[ServedDataset]:
        """Load the dataset with that id, once for all concurrent callers.

        The future raises NotFound where there is no catalog or its source is no longer allowed, CorruptData for a damaged
        file, and SourceUnavailable while the allowlist cannot be resolved.
        """
        with self._lock:
            if wanted in self._loaded:
                ready: Future[ServedDataset] = Future()
                if wanted in self._withdrawn:
                    ready.set_exception(unknown(wanted))
                else:
                    ready.set_result(self._loaded[wanted])
                return ready
            found = self._loading.get(wanted)
            if found is not None:
                return found
            found = self._loading[wanted] = self._executor.submit(self._read, wanted)
        # Only the callers keep it until one calls `admit`: they may have left, or may not be allowed to use it.
        found.add_done_callback(lambda _: self._loading.pop(wanted, None))
        return found

    def stored(self, wanted: DatasetId) -> bool:
        """Tell whether there is a catalog file, even if its source is not allowed now."""
        return re.fullmatch("[0-9a-f]{32}", wanted) is not None and os.path.exists(self._path(wanted))

    def stored_ids(self) -> list[DatasetId]:
        """Return the datasets that have a catalog file."""
        names = (name.partition(".") for name in os.listdir(self.directory))
        return [
            DatasetId(name) for name, _, ending in names if ending == "lmdb" and self.stored(DatasetId(name))
        ]

    def admit(self, dataset: ServedDataset) -> ServedDataset:
        """Keep a loaded dataset for claims and grants, and unload the least recently used ones beyond the limits.

        Returns the dataset that was already kept under that id, if any. Runs on the event loop's thread.
        """
        with self._lock:
            known = self._loaded.pop(dataset.id, None)
            self._loaded[dataset.id] = known or dataset  # the most recently used is the last
            if known is not None:
                return known
        self.unload_unclaimed(dataset)
        return dataset

    def unload_unclaimed(self, but: ServedDataset | None = None) -> None:
        """Unload the least recently used datasets without claims beyond the limits. Runs on the event loop's thread."""
        unclaimed = [each for each in self._loaded.values() if each is not but and not self.claimed(each)]
        for each in oldest_beyond(unclaimed, MAX_UNUSED, MAX_UNUSED_EXTENTS):  # checking all would take long
            if not self.used(each):
                self._unload(each)
        unclaimed = [each for each in unclaimed if each.id in self._loaded]
        for each in oldest_beyond(unclaimed, len(unclaimed), MAX_CACHED_EXTENTS):
            self._unload(each)

    def note_opening(self, dataset: DatasetId, listed_at: int) -> None:
        """Note whether the source was asked for this version: `listed_at` is 0, or the time of the listing that stands in
        for that of a source that is down."""
        self.stale.pop(dataset, None)
        if listed_at:
            self.stale[dataset] = listed_at
            self.stale_openings += 1

    def _unload(self, dataset: ServedDataset) -> None:
        self.stale.pop(dataset.id, None)
        with self._lock:
            del self._loaded[dataset.id]  # code that still refers to it can use it, and admit it again

    def dataset_with(self, extent: ExtentId) -> tuple[ServedDataset, int] | None:
        """A loaded dataset that has the extent, and the extent's index in it; None where there is none.

        Indexed datasets come before provisional ones, and then claimed ones first, since the fill's bytes count for the
        dataset. O(datasets). Runs on the event loop's thread.
        """
        every = (each for loaded in self._loaded.values() for each in (loaded, loaded.source))
        having = [each for each in every if each is not None and extent in each.index_of]
        found = min(having, key=lambda each: (each.provisional, not self.claimed(each)), default=None)
        return (found, found.index_of[extent]) if found else self.undeclared(extent)

    def known(self, wanted: DatasetId) -> ServedDataset | None:
        """The dataset if it is loaded, else None."""
        return self._loaded.get(wanted)

    def all(self) -> list[ServedDataset]:
        """All loaded datasets, the most recently used last."""
        return list(self._loaded.values())

    def listed(self, readers: Counter[DatasetId]) -> list[ServedDataset]:
        """The datasets to list: all loaded ones except provisional ones without readers."""
        return [each for each in self.all() if not each.provisional or readers[each.id]]

    def tidy(self, pinned: Callable[[], Iterable[DatasetId]]) -> None:
        """Remove catalogs from disk, on another thread: those unused for 30 days, and the least recently used ones beyond
        the size limit. Loaded and pinned ones stay."""
        now = time.monotonic()
        with self._lock:
            if now < self._tidy_at:
                return
            self._tidy_at = now + TIDY_S
        self._executor.submit(self._remove_unused, pinned)

    def prepared(
        self, source: ServedDataset, recipe: Recipe, form: PreparedForm | None, user: int
    ) -> ServedDataset | None:
        """Load what a user's function makes of a dataset. Its catalog is derived where there is none yet; without `form`
        the result is None then. Raises as `derive` and `load`. Not for the event loop's thread."""
        recipe.check()
        dataset = recipe.dataset(source.id, user)
        with self._deriving:
            if not self.stored(dataset):
                if form is None:
                    return None
                derive(source.catalog, recipe, form, user, self.directory)
        return self.load(dataset).result()

    def close(self) -> None:
        """Unload all datasets and release the directory."""
        self._loaded.clear()
        os.close(self._claim)

    def _path(self, wanted: DatasetId) -> str:
        return f"{self.directory}/{wanted}.lmdb"

    def _remove_unused(self, pinned: Callable[[], Iterable[DatasetId]]) -> None:
        try:
            with self._lock:
                sources = (each.source.id for each in self._loaded.values() if each.source is not None)
                kept = {*self._loaded, *self._loading, *sources}
            removed = remove_unused(self.directory, kept.union(pinned()))
        except OSError as error:
            log.warning("unused catalogs cannot be removed", extra={"error": str(error)})
            return
        if removed:
            log.info("unused catalogs are removed", extra={"files": len(removed)})

    def _read(self, wanted: DatasetId) -> ServedDataset:
        if not self.stored(wanted) or not mark_used(self._path(wanted)):
            raise unknown(wanted)
        sealed = SealedCatalog(sealed_copy(self._path(wanted)))
        catalog = Catalog.open(f"/proc/self/fd/{sealed.fd}")
        origin = origin_of(catalog)
        source = self._loaded.get(origin.source) or self._read(origin.source) if origin is not None else None
        if source is None:
            self._lookups.run(lambda: self._check_allowed(wanted, catalog), catalog.uri)
        ids = tuple(catalog.extents())
        # Lists first: a tuple under construction stays young, and each young garbage collection would walk all of it.
        sizes = tuple([int(size) for size in catalog.extent_sizes])
        index_of = {extent: index for index, extent in enumerate(ids)}
        rules = self._rules_of(catalog, source)
        made_from: tuple[SourceExtent, ...] = ()
        if origin is not None and source is not None:
            indices = origin.source_extents.tolist()
            made_from = tuple([(source.extent_ids[index], source.sizes[index]) for index in indices])
        # In Python steps: a single C call for a million extents would hold the GIL, and so block the event loop.
        pairs = enumerate(zip(ids, sizes))
        extents = tuple([pair for index, pair in pairs if index_of[pair[0]] == index])
        return ServedDataset(wanted, catalog, sealed, ids, sizes, extents, index_of, rules, source, made_from)

    def check_again(self) -> None:
        """Check all loaded datasets against an allowlist that changed. Raises SourceUnavailable where a mount hangs."""
        withdrawn, rules = set(), {}
        for each in self.all():
            try:
                checked = (each.source or each).catalog
                self._lookups.run(partial(self._check_allowed, each.id, checked), checked.uri)
            except NotFound:
                withdrawn.add(each.id)
            rules[each.id] = self._rules_of(each.catalog, each.source)
        with self._lock:
            self._withdrawn = frozenset(withdrawn)
            for name, found in rules.items():
                if name in self._loaded:
                    self._loaded[name] = replace(self._loaded[name], rules=found)

    def _rules_of(self, catalog: Catalog, source: ServedDataset | None) -> frozenset[Rule]:
        """Return the rules of a dataset; of a prepared one those of its source, and of the user who prepared it."""
        if source is not None and (origin := origin_of(catalog)) is not None:
            return self._rules_of(source.catalog, None) | {Rule(catalog.uri, (origin.user,), ())}
        objects = (catalog.object(index).uri for index in range(catalog.objects))
        return self._tenants.rules_of(_folder(catalog), objects)

    def _check_allowed(self, wanted: DatasetId, catalog: Catalog) -> None:
        """Check every object, since the allowlist may have become narrower after the catalog was built.

        Raises NotFound, which reveals neither the objects nor the allowed prefixes; its cause is the refusal.
        """
        if self._tenants.allows(_folder(catalog)):
            return
        for index in range(catalog.objects):  # the common prefix is above the allowed prefixes
            uri = catalog.object(index).uri
            if not self._tenants.allows(uri):
                raise unknown(wanted) from NotAllowed(f"{uri} is not below an allowed prefix")


def oldest_beyond(
    unclaimed: Sequence[ServedDataset], max_datasets: int, max_extents: int
) -> Iterator[ServedDataset]:
    """Yield datasets from the first on, until the rest is within both limits."""
    extents = sum(len(each.sizes) for each in unclaimed)
    for count, each in zip(range(len(unclaimed), 0, -1), unclaimed, strict=True):
        if count <= max_datasets and extents <= max_extents:
            return
        extents -= len(each.sizes)
        yield each


def unknown(wanted: DatasetId) -> NotFound:
    """The error for a dataset that is not there, or that the caller may not see: the two must look the same."""
    return NotFound(f"dataset {wanted} is not known here; open it by its URI")


def _folder(catalog: Catalog) -> str:
    return catalog.uri_prefix.rpartition("/")[0] + "/"


def claim_directory(directory: str) -> int:
    """Lock the catalog directory; return the descriptor that holds the lock.

    Where no other daemon uses it, also remove the files that a killed daemon left: unfinished files, provisional catalogs,
    damaged ones and those of other releases. Folders stay, since the daemon makes none.
    """
    claim = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for found in list(os.scandir(directory)):
            if not found.is_dir(follow_symlinks=False) and (wrong := _defect(found)):
                log.info("an unusable catalog is removed", extra={"file": found.name, "error": wrong})
                os.unlink(found)
    except BlockingIOError:
        log.warning("another daemon uses the same catalogs", extra={"directory": directory})
    fcntl.flock(claim, fcntl.LOCK_SH)
    return claim


def _defect(found: os.DirEntry[str]) -> str:
    """The defect of a file among the catalogs; "" for a good catalog."""
    if not found.name.endswith(".lmdb") or not found.is_file(follow_symlinks=False):
        return "unfinished"
    try:
        return "" if Catalog.open(found.path).samples > 0 else "not indexed to its end"
    except CorruptData as error:  # perhaps a catalog of another release
        return str(error.__cause__ or error)


def sealed_copy(path: str) -> int:
    """Copy a file into a sealed memfd and return a read-only descriptor: validated bytes cannot change under readers."""
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
