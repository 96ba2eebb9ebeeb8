"""Opens datasets in the daemon, and decides by CACHESVC what a missing daemon means."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, get_args

from cachesvc.catalog.options import Options
from cachesvc.client import local_view
from cachesvc.client.control import Control
from cachesvc.client.grants import DaemonGrants
from cachesvc.core.errors import Busy, DaemonUnavailable, InvalidInput, NotAllowed, NotFound
from cachesvc.core.limits import ACQUIRE_S, PROBE_FIRST_S, REQUIRE_S
from cachesvc.core.model import DatasetId
from cachesvc.sources.uri import local_path
from cachesvc.system.deadline import Deadline

Policy = Literal["auto", "require", "off"]
COMPARISONS = 3
"""How often a local path is opened that looks different here: a file may have changed since the daemon listed it."""
_log = logging.getLogger("cachesvc")


@dataclass(frozen=True, slots=True)
class Opened:
    """A dataset that a daemon has open: its id, the directory of the daemon's sockets, whether the source may be read
    directly while the daemon is gone, and the warning of a version that was not compared with its source, which is down."""

    id: DatasetId
    directory: str
    direct: bool
    stale: str = ""
    kept: tuple[str, ...] = ()
    """The versions that open on this node without the source, where it is down."""
    sharing: tuple[DatasetId, ...] = ()
    """For `format="objects"`: datasets in use that may have the same bytes in other extents."""


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
    given = os.environ.get("CACHESVC_TIMEOUT_S") or str(ACQUIRE_S)
    if not given.replace(".", "", 1).isdigit() or not float(given):
        raise InvalidInput(f"CACHESVC_TIMEOUT_S={given!r} is not a number of seconds above 0")
    return float(given)


def open_by_policy(
    uris: Sequence[str], options: Options, version: str, world_size: int, refresh: bool = False
) -> Opened | None:
    """Open a dataset in the daemon; None where this process reads the source itself. `refresh`: list the source anew.

    Raises DaemonUnavailable when a daemon is required and none answers in 5 s, InvalidInput for a local path at which this
    process sees other files than the daemon, and what opening a dataset raises.
    """
    wanted, explicit = policy(world_size)
    local = all(local_path(uri) is not None for uri in uris)
    required = wanted == "require" and (explicit or not local)
    if wanted == "off":
        return None
    differs = ""
    try:
        for _ in range(COMPARISONS):
            opened = _open_in_daemon(
                uris, options, version, refresh, required, local and not explicit, wanted != "require"
            )
            if opened is None or not local:
                return opened
            with closing(DaemonGrants(opened.directory, opened.id)) as grants:
                differs = local_view.difference(uris, options, grants.open_catalog())
            if not differs:
                return opened
    except NotFound as error:
        if not local or not local_view.finds_files(uris):
            raise
        unseen = f"the daemon does not see the files at {_folder(uris[0])} that this process sees"
        if required:
            raise NotFound(
                f"{unseen} ({error}): mount the same folder for the daemon (its unit may have PrivateTmp=yes), or "
                "set CACHESVC=auto"
            ) from None
        _warn_once(f"{unseen} (PrivateTmp=yes, or another mount): reading them directly")
        return None
    except DaemonUnavailable as error:
        if explicit or isinstance(error, Busy):
            raise
        raise DaemonUnavailable(
            f"{error} (a job of {world_size} ranks needs one; CACHESVC=auto has each rank read the source itself)"
        ) from None
    raise InvalidInput(
        f"this process and the daemon see different files at {_folder(uris[0])} (the first: {differs}): mount the same "
        "folder for both, or set CACHESVC=off to read what this process sees"
    )


def _folder(uri: str) -> str:
    path = str(local_path(uri))
    return os.path.dirname(path) if os.path.isfile(path) else path


@lru_cache(64)
def _warn_once(message: str) -> None:
    """Log a warning, once for each folder: a program may open thousands of its files by name."""
    _log.warning(message)


def _open_in_daemon(
    uris: Sequence[str],
    options: Options,
    version: str,
    refresh: bool,
    required: bool,
    optional: bool,
    direct: bool,
) -> Opened | None:
    """Open the dataset in a daemon. Returns None without one, unless it is `required`. `optional`: also return None where
    the daemon may not read the data."""
    deadline = Deadline(REQUIRE_S if required else 0.0)
    while True:
        try:
            with Control() as control:
                opened = control.open_dataset(uris, options, version, refresh)
                of_daemon = opened.stale, opened.kept, opened.sharing
                return Opened(opened.id, control.directory, direct, *of_daemon)
        except DaemonUnavailable as error:
            if error.for_good or not deadline.pause(PROBE_FIRST_S):
                if required:
                    raise
                return None
        except NotAllowed:
            if not optional:
                raise
            return None
