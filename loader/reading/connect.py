"""Chooses how the data of a dataset is read: through the daemon, directly from the source, or from local files."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import Busy, DaemonUnavailable, InvalidInput, NotAllowed, NotFound, StateMismatch
from cachesvc.core.model import DatasetId
from cachesvc.core.order.epoch_order import Plan
from loader.job.job_id import job_number
from loader.process.fork_hooks import abandon_in_children
from loader.reading.direct_access import Access, compile_locally, direct_access
from loader.reading.failover import FailoverGrants
from loader.reading.local_files import local_path
from loader.reading.reader import ACQUIRE_TIMEOUT_S
from loader.reading.reopen import ReopeningGrants
from loader.reading.thrash_warning import ThrashWarning, check_extents_fit

Policy = Literal["auto", "require", "off"]
PROBE_EVERY_S = 0.1
"""The pause between two connects: a daemon that starts does not announce itself."""
REQUIRE_S = 5.0
"""How long `require` waits for a daemon: long enough for a node that starts both at once, too short to hide a forgotten
daemon."""
_log = logging.getLogger("cachesvc")


@dataclass(frozen=True, slots=True)
class DatasetLink:
    """The way to one dataset version; small, and picklable for workers.

    `daemon` is the directory of its sockets, empty without one; `path` the catalog file, empty with a daemon. `direct`:
    whether the source may be read directly, with a daemon while it is gone. `job`: the readers that have one share of the
    daemon's fills. `uris` and `options`: the arguments with which the daemon opened the dataset.
    """

    id: DatasetId
    daemon: str = ""
    path: str = ""
    direct: bool = False
    job: int = 0
    uris: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)

    def catalog(self) -> Catalog:
        """Map the catalog. Raises StateMismatch when the file at `path` is another version's, DaemonUnavailable when the
        daemon is gone for longer than CACHESVC_TIMEOUT_S."""
        if not self.daemon:
            found = Catalog.open(self.path)
        else:
            fd = _granted_catalog(self)
            try:
                found = Catalog.open(f"/proc/self/fd/{fd}")
            finally:
                os.close(fd)
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
            control.open_dataset(self.uris, options, self.id)

    def access(self, catalog: Catalog) -> Access:
        """Connect this process."""
        direct = direct_access(catalog) if self.direct else None
        if self.daemon:
            return _daemon_access(self, catalog, direct)
        assert direct is not None, "a link has a daemon or reads directly"
        return direct


def _granted_catalog(link: DatasetLink) -> int:
    """A descriptor of the catalog. Spawned workers request it in every epoch, possibly while the daemon restarts."""
    timeout_s, waiting, forgotten = read_timeout_s(), False, False
    deadline = time.monotonic() + timeout_s
    while True:
        grants = DaemonGrants(link.daemon, link.id)
        try:
            if forgotten:
                link.open_again()
            return grants.catalog()
        except NotFound:
            if forgotten:
                raise
            forgotten = True
            continue
        except DaemonUnavailable as error:
            if time.monotonic() >= deadline:
                raise
            why = str(error)
        finally:
            grants.close()
        if not waiting:
            waiting = True
            _log.warning("no daemon answers (%s): waiting up to %.0f s for one", why, timeout_s)
        time.sleep(PROBE_EVERY_S)


def _daemon_access(link: DatasetLink, catalog: Catalog, direct: Access | None) -> Access:
    def connection() -> DaemonGrants:
        made = DaemonGrants(link.daemon, link.id, link.job)
        abandon_in_children(made)
        return made

    first, thrash_warning = connection(), ThrashWarning(catalog.extent_sizes)

    def submit(plan: Plan) -> None:
        if direct is not None:
            direct.submit(plan)
        first.submit(plan)
        if direct is None:
            check_extents_fit(catalog, first.tier_budgets)
        thrash_warning.check(plan, first.tier_budgets)

    daemon = ReopeningGrants(first, partial(link.open_again, catalog.extent_bytes))
    grants = FailoverGrants(daemon, direct.grants if direct is not None else None)
    return Access(grants, submit, first.waited, first.suspect, first.recalled, connection)


def policy(world_size: int) -> tuple[Policy, bool]:
    """CACHESVC, or its default, and whether it was set. Raises InvalidInput."""
    given: Any = os.environ.get("CACHESVC", "")
    if given in get_args(Policy):
        return given, True
    if given:
        raise InvalidInput(f"CACHESVC={given!r} is none of auto, require, off")
    return ("require" if world_size > 1 else "auto"), False


def read_timeout_s() -> float:
    """CACHESVC_TIMEOUT_S, or its default: how long a read waits for its bytes, a daemon's restart included, before it
    raises DaemonUnavailable or DeadlineExceeded. Raises InvalidInput."""
    given = os.environ.get("CACHESVC_TIMEOUT_S") or str(ACQUIRE_TIMEOUT_S)
    if not given.replace(".", "", 1).isdigit() or not float(given):
        raise InvalidInput(f"CACHESVC_TIMEOUT_S={given!r} is not a number of seconds above 0")
    return float(given)


def connect(uris: Sequence[str], options: Options, version: str, world_size: int) -> DatasetLink:
    """Open a dataset in the daemon, or compile its catalog here. Raises DaemonUnavailable when a daemon is required and
    none answers in 5 s, SourceChanged when the source does not hold `version`, and what opening a dataset raises."""
    wanted, explicit = policy(world_size)
    local = all(local_path(uri) is not None for uri in uris)
    required = wanted == "require" and (explicit or not local)
    if wanted != "off":
        try:
            link = _open_in_daemon(
                uris, options, version, required, local and not explicit, wanted != "require"
            )
        except DaemonUnavailable as error:
            if explicit or isinstance(error, Busy):
                raise
            raise DaemonUnavailable(
                f"{error} (a job of {world_size} ranks needs one; CACHESVC=auto has each rank read the source itself)"
            ) from None
        if link is not None:
            return link
        if not local:
            _log.warning("no daemon: reading straight from the source; start one: cachesvc serve")
    found, path = compile_locally(uris, options, version)
    return DatasetLink(found, path=path, direct=True)


def _open_in_daemon(
    uris: Sequence[str], options: Options, version: str, required: bool, optional: bool, direct: bool
) -> DatasetLink | None:
    """Open the dataset in a daemon. Returns None without one, unless it is `required`. `optional`: also return None where
    the daemon may not read the data."""
    deadline = time.monotonic() + (REQUIRE_S if required else 0.0)
    while True:
        try:
            with Control() as control:
                found = control.open_dataset(uris, options, version)
                job = job_number(os.environ)
                return DatasetLink(found.id, control.directory, "", direct, job, tuple(uris), options)
        except DaemonUnavailable:
            if time.monotonic() >= deadline:
                if required:
                    raise
                return None
            time.sleep(PROBE_EVERY_S)
        except NotAllowed:
            if not optional:
                raise
            return None
