"""Which way the data comes: through the daemon, straight from the source, or from local files. Design D10."""

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
from loader.reading.direct_access import Access, compile_here, reads_around
from loader.reading.failover import Failover
from loader.reading.local_files import local_path
from loader.reading.reader import ACQUIRE_TIMEOUT_S
from loader.reading.reopen import Reopened
from loader.reading.thrash_warning import Crowded

Policy = Literal["auto", "require", "off"]
KNOCK_EVERY_S = 0.1
"""Nobody can tell us when a daemon starts; this paces the knocking."""
REQUIRE_S = 5.0
"""How long `require` waits for a daemon: a node that starts both at once, not a forgotten daemon."""
_log = logging.getLogger("cachesvc")


@dataclass(frozen=True, slots=True)
class Link:
    """Where one dataset version comes from; small, and picklable for workers.

    `daemon` is the directory of its sockets, empty without one; `path` the catalog file, empty with one;
    `around` whether reads may go around a daemon that is gone; `job` what its readers have in common; `uris` and
    `options` what a daemon opened it from.
    """

    id: DatasetId
    daemon: str = ""
    path: str = ""
    around: bool = False
    job: int = 0
    uris: tuple[str, ...] = ()
    options: Options = field(default_factory=Options)

    def catalog(self) -> Catalog:
        """Map the catalog. Raises StateMismatch when the file at `path` is another version's, DaemonUnavailable
        when a daemon that went away is not back in CACHESVC_TIMEOUT_S."""
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
        """Have a daemon that does not know this version compile it once more. `extent_bytes`: the size of its extents,
        since the daemon may have another of its own by now; 0: the size that was asked for at first. Raises SourceChanged
        when the source has another version by now, and what opening a dataset raises."""
        _log.warning("the daemon was started without the catalog of version %s: it opens it again", self.id)
        with Control(self.daemon) as control:
            options = replace(self.options, extent_bytes=extent_bytes or self.options.extent_bytes)
            control.open_dataset(self.uris, options, self.id)

    def access(self, catalog: Catalog) -> Access:
        """Connect this process."""
        around = reads_around(catalog) if self.around else None
        if self.daemon:
            return _through_daemon(self, catalog, around)
        assert around is not None, "a link has a daemon or a way around it"
        return around


def _granted_catalog(link: Link) -> int:
    """Spawned workers ask for it in every epoch, and the daemon may be starting again just then."""
    timeout_s, waiting, forgotten = read_timeout_s(), False, False
    deadline = time.monotonic() + timeout_s
    while True:
        asking = DaemonGrants(link.daemon, link.id)
        try:
            if forgotten:
                link.open_again()
            return asking.catalog()
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
            asking.close()
        if not waiting:
            waiting = True
            _log.warning("no daemon answers (%s): waiting up to %.0f s for one", why, timeout_s)
        time.sleep(KNOCK_EVERY_S)


def _through_daemon(link: Link, catalog: Catalog, around: Access | None) -> Access:
    def connection() -> DaemonGrants:
        made = DaemonGrants(link.daemon, link.id, link.job)
        abandon_in_children(made)
        return made

    first, crowded = connection(), Crowded(catalog.extent_sizes)

    def submit(plan: Plan) -> None:
        if around is not None:
            around.submit(plan)
        first.submit(plan)
        crowded.look(plan, first.rooms)

    daemon = Reopened(first, partial(link.open_again, catalog.extent_bytes))
    grants = Failover(daemon, around.grants if around is not None else None)
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
    """CACHESVC_TIMEOUT_S, or its default: how long a read waits for its bytes, a daemon's restart included,
    before it raises DaemonUnavailable or DeadlineExceeded. Raises InvalidInput."""
    given = os.environ.get("CACHESVC_TIMEOUT_S") or str(ACQUIRE_TIMEOUT_S)
    if not given.replace(".", "", 1).isdigit() or not float(given):
        raise InvalidInput(f"CACHESVC_TIMEOUT_S={given!r} is not a number of seconds above 0")
    return float(given)


def connect(uris: Sequence[str], options: Options, version: str, world_size: int) -> Link:
    """Find the way for a dataset. Raises DaemonUnavailable when one is required and none answers in 5 s,
    SourceChanged when `version` is not what the source holds now, and what opening a dataset raises."""
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
    found, path = compile_here(uris, options, version)
    return Link(found, path=path, around=True)


def _open_in_daemon(
    uris: Sequence[str], options: Options, version: str, required: bool, optional: bool, around: bool
) -> Link | None:
    deadline = time.monotonic() + (REQUIRE_S if required else 0.0)
    while True:
        try:
            with Control() as control:
                found = control.open_dataset(uris, options, version)
                job = job_number(os.environ)
                return Link(found.id, control.directory, "", around, job, tuple(uris), options)
        except DaemonUnavailable:
            if time.monotonic() >= deadline:
                if required:
                    raise
                return None
            time.sleep(KNOCK_EVERY_S)
        except NotAllowed:
            if not optional:
                raise
            return None
