"""Chooses how the data of a dataset is read: through the daemon, directly from the source, or from local files."""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch.utils.data import get_worker_info

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.catalog.prepared import Recipe
from cachesvc.client.control import Control, PreparedInfo, is_upgrading
from cachesvc.client.failover import FailoverGrants
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.opening import open_by_policy, policy, read_timeout_s
from cachesvc.client.own_catalogs import compile_locally
from cachesvc.client.preparing import PreparerConnection
from cachesvc.client.protocol import Granted, Grants
from cachesvc.core.errors import DaemonUnavailable, InvalidInput, NotFound, StateMismatch
from cachesvc.core.limits import PROBE_FIRST_S
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from cachesvc.sources.shard_lists import spelled_uris
from cachesvc.sources.uri import canonical, local_path
from cachesvc.system.deadline import Deadline
from cachesvc.system.fork_hooks import abandon_in_children
from loader.reading.direct.direct_access import Access, direct_access
from loader.reading.prepared_grants import PreparedGrants
from loader.reading.thrash_warning import ThrashWarning, check_extents_fit

_LAUNCHERS = (
    ("SLURM_JOB_ID", "SLURM_STEP_ID"),
    ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT"),
    ("MASTER_ADDR", "MASTER_PORT"),
)
"""Environment variables that launchers set equally for all ranks of a job, and differently for each job. The first group
that is set counts."""
ASKED_AT_ONCE = 64
_log = logging.getLogger("cachesvc")


@dataclass(frozen=True, slots=True)
class DatasetLink:
    """The way to one dataset version; small, and picklable for workers.

    `daemon` is the directory of its sockets, empty without one; `path` the catalog file, empty with a daemon. `direct`:
    whether the source may be read directly, with a daemon while it is gone. `job`: the readers that have one share of the
    daemon's fills. `uris` and `options`: the arguments with which the daemon opened the dataset. `kept`: the versions that
    open on this node without the source, where it is down.
    """

    id: DatasetId
    daemon: str = ""
    path: str = ""
    direct: bool = False
    job: int = 0
    uris: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)
    kept: tuple[str, ...] = ()
    claims: bool = True
    """The daemon keeps this dataset; False for one that others are prepared from."""
    source: DatasetId | None = None
    recipe: Recipe | None = None
    """The function that prepares this dataset from `source`, of `uris` and `options`; None for other datasets."""
    form: str = ""
    """The form of its records."""

    def catalog(self) -> Catalog:
        """Map the catalog. Raises StateMismatch when the file at `path` is another version's, DaemonUnavailable when the
        daemon is gone for longer than CACHESVC_TIMEOUT_S."""
        found = _granted_catalog(self) if self.daemon else Catalog.open(self.path)
        if found.id != self.id:
            raise StateMismatch(f"the catalog of version {self.id} holds {found.id}; open the dataset again")
        return found

    def open_again(self, extent_bytes: int = 0) -> None:
        """Have a daemon that does not know this version compile it once more. `extent_bytes`: the size of its extents, as
        the daemon's default may have changed; 0: the size that `options` asks for. Raises SourceChanged when the source
        has another version by now, and what opening a dataset raises."""
        _log.warning("the daemon was started without the catalog of version %s: it opens it again", self.id)
        with Control(self.daemon) as control:
            options = replace(self.options, extent_bytes=extent_bytes or self.options.extent_bytes)
            control.open_dataset(self.uris, options, self.source or self.id)
            if self.recipe is not None and self.source is not None:
                control.open_prepared(self.source, self.recipe, self.form)

    def prepared(self, recipe: Recipe, form: Callable[[], str]) -> tuple[DatasetLink, PreparedInfo]:
        """Return the way to what a function makes of each sample, and what the daemon knows of it. `form()` returns the
        form of its records, for a daemon that does not know it yet."""
        with Control(self.daemon) as control:
            found = control.open_prepared(self.id, recipe)
        if found is None:  # the trial takes its time, and may fork
            known = form()
            with Control(self.daemon) as control:
                found = control.open_prepared(self.id, recipe, known)
        assert found is not None, "a daemon that knows the form"
        return replace(self, id=found.id, direct=False, claims=True, source=self.id, recipe=recipe), found

    def resident(self, extents: Sequence[int]) -> set[int]:
        """Return which of these extents are on this node now; none without a daemon. Raises as `Grants.acquire`."""
        if not self.daemon:
            return set()
        grants, found = DaemonGrants(self.daemon, self.id, self.job, claims=False, fetches=False), set[int]()
        try:
            for begin in range(0, len(extents), ASKED_AT_ONCE):
                for answer in grants.acquire(extents[begin : begin + ASKED_AT_ONCE], read_timeout_s()):
                    if isinstance(answer, Granted):
                        os.close(answer.fd)
                        grants.release([answer.extent])
                        found.add(answer.extent)
        finally:
            grants.close()
        return found

    def preparer(self) -> PreparerConnection:
        """Offer the daemon to prepare extents of this dataset. Raises as `PreparerConnection`."""
        made = PreparerConnection(self.daemon, self.id, self.job)
        abandon_in_children(made)
        return made

    def access(self, catalog: Catalog) -> Access:
        """Connect this process."""
        direct = direct_access(catalog) if self.direct else None
        if self.daemon:
            return _daemon_access(self, catalog, direct)
        assert direct is not None, "a link has a daemon or reads directly"
        return direct


def _granted_catalog(link: DatasetLink) -> Catalog:
    """The catalog as the daemon has it. Spawned workers request it in every epoch, possibly while the daemon restarts."""
    timeout_s, waiting, forgotten = read_timeout_s(), False, False
    deadline = Deadline(timeout_s)
    while True:
        grants = DaemonGrants(link.daemon, link.id)
        try:
            if forgotten:
                link.open_again()
            return grants.open_catalog()
        except NotFound:
            if forgotten:
                raise
            forgotten = True
            continue
        except DaemonUnavailable as error:
            if error.for_good or not deadline.pause(PROBE_FIRST_S):
                raise
            if not waiting:
                waiting = True
                _log.warning("no daemon answers (%s): waiting up to %.0f s for one", error, timeout_s)
        finally:
            grants.close()


def _daemon_access(link: DatasetLink, catalog: Catalog, direct: Access | None) -> Access:
    def connection() -> DaemonGrants:
        made = DaemonGrants(link.daemon, link.id, link.job, link.claims)
        abandon_in_children(made)
        return made

    first, thrash_warning = connection(), ThrashWarning(catalog.extent_sizes)

    def submit(plan: Plan, part: float) -> None:
        if direct is not None:
            direct.submit(plan, part)
        first.submit(plan)
        if direct is None and link.recipe is None:
            check_extents_fit(catalog, first.tier_budgets)
        thrash_warning.check(plan, first.tier_budgets)

    first.opens_again(partial(link.open_again, catalog.extent_bytes), lambda: get_worker_info() is None)
    fallback = direct.grants if direct is not None else None
    grants: Grants = FailoverGrants(first, fallback, partial(is_upgrading, link.daemon))
    if link.recipe is not None:
        grants = PreparedGrants(first)
    return Access(grants, submit, first.waited, first.suspect, first.recalled, connection)


def connect(uris: Sequence[str], options: Options, version: str, world_size: int) -> DatasetLink:
    """Open a dataset in the daemon, or compile its catalog here. Raises DaemonUnavailable when a daemon is required and
    none answers in 5 s, SourceChanged when the source does not hold `version`, and what opening a dataset raises."""
    opened = open_by_policy(uris, options, version, world_size)
    if opened is not None:
        if opened.stale:
            _log.warning("%s", opened.stale)
        job = job_number(os.environ)
        return DatasetLink(
            opened.id, opened.directory, "", opened.direct, job, tuple(uris), options, opened.kept
        )
    if policy(world_size)[0] != "off" and any(local_path(uri) is None for uri in uris):
        _log.warning(
            "no daemon: each process reads straight from the source; start one: cachesvc serve, or `cachesvc run`"
        )
    found, path = compile_locally(uris, options, version)
    return DatasetLink(found, path=path, direct=True, uris=tuple(uris), options=options)


def canonical_uris(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]]) -> list[str]:
    """Return canonical URIs of one or several, with `~` expanded as in the CLI, of lists joined by `::` and of
    `pipe:` commands. Raises InvalidInput for other types."""
    several = isinstance(given, Iterable) and not isinstance(given, (str, bytes, os.PathLike))
    uris: list[Any] = list(given) if several else [given]  # type: ignore[arg-type]
    for one in uris:
        if not isinstance(one, (str, os.PathLike)):
            raise InvalidInput(f"{one!r} is not a URI; give open_dataset a str, a path, or a list of them")
    spelled = [each for one in uris for each in spelled_uris(os.fsdecode(one))]
    return [canonical(os.path.expanduser(each)) for each in spelled]


def job_number(environ: Mapping[str, str]) -> int:
    """A number from 1 to 2^64 - 1 that is equal in all ranks of a job, also after its restarts: the readers of one job have
    one share of a daemon's fills. Without a launcher it is equal in one process group: the processes that one shell
    command started."""
    for names in _LAUNCHERS:
        if environ.get(names[0]):
            identity = "\0".join(environ.get(name, "") for name in names)
            break
    else:  # with the PID namespace, since each container numbers its processes from 1
        identity = f"{os.stat('/proc/self/ns/pid').st_ino}\0{os.getpgrp()}"
    return int.from_bytes(hashlib.blake2b(identity.encode(), digest_size=8).digest(), "little") or 1
