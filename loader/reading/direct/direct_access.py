"""Direct reads: this process compiles the catalog and fills the extents itself, with its own credentials."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cachesvc.catalog.build import DirectBytes, build
from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.options import Options
from cachesvc.catalog.pinned import kept_version
from cachesvc.catalog.survey import survey
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Grants
from cachesvc.core.errors import CorruptData, SourceChanged
from cachesvc.core.model import DatasetId, Extent
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.stalls import StallReport
from cachesvc.sources.fetch import Fetcher, encode_missing
from cachesvc.sources.open import Sources, SourceSettings
from loader.reading.direct.direct_fills import DirectGrants
from loader.reading.direct.local_copies import copy_budget
from loader.reading.direct.local_files import LocalGrants
from loader.reading.direct.shared_rate import direct_rate

DIRECT_THREADS = 8
"""Connections of one fill, of the few that a process runs at once; the fillers of a daemon use more."""


def _drop_report(report: StallReport) -> None:
    """Do nothing: without a daemon there are no metrics."""


def _suspect_nothing(extents: Sequence[int]) -> None:
    """Do nothing: direct reads cache nothing in files."""


def _recall_nothing() -> Mapping[int, bool]:
    """Return nothing: direct reads share no room with other processes."""
    return {}


@dataclass(frozen=True, slots=True)
class Access:
    """The extents of one dataset for one process, and what it reports to their holder.

    `submit` sends the plan by which extents will be needed, and the part of their samples that this process reads,
    `report` the waits of steps, `suspect` extents that were
    granted corrupt. `recalled` returns the extents that the holder recalls, and whether each is corrupt.
    `connect_another` makes a connection for the plan of an order that runs at the same time."""

    grants: Grants
    submit: Callable[[Plan, float], None]
    report: Callable[[StallReport], None] = _drop_report
    suspect: Callable[[Sequence[int]], None] = _suspect_nothing
    recalled: Callable[[], Mapping[int, bool]] = _recall_nothing
    connect_another: Callable[[], DaemonGrants] | None = None


def direct_access(catalog: Catalog) -> Access:
    """Grants local files themselves or copies of them, and fills all other extents into this process's memory, in the
    order of the plan."""
    home = _home()
    settings = SourceSettings(metadata_directory=Path(home) / "metadata")
    sources, own = Sources(settings), threading.local()

    def fill(extent: Extent, fd: int) -> str:
        if not hasattr(own, "fetcher"):
            own.fetcher = Fetcher(sources, DIRECT_THREADS)  # a fetcher serves one thread
        return encode_missing(own.fetcher.fetch(extent, fd))

    direct = DirectGrants(catalog.extent, fill, direct_rate(home).take)
    copies = DirectGrants(catalog.extent, fill, lambda _: 0.0)
    local = LocalGrants(catalog.extent, direct, copies)

    def submit(plan: Plan, part: float) -> None:
        extents = plan.extent.tolist()
        direct.follow(extents)
        local.follow(extents, copy_budget(catalog, plan, part))

    return Access(local, submit)


def compile_locally(uris: Sequence[str], options: Options, version: str) -> tuple[DatasetId, str]:
    """Compile a catalog, or find the one compiled before; returns its id and its path. Nothing is asked of the source if
    the catalog of `version` is kept. Raises SourceChanged when the source does not hold `version`."""
    home = _home()
    if kept_version(f"{home}/catalogs", version, uris, options):
        return DatasetId(version), f"{home}/catalogs/{version}.lmdb"
    sources = Sources(SourceSettings(metadata_directory=Path(home) / "metadata"))
    found = survey(sources.expand(uris), options, sources)
    if version and version != found.id:
        raise SourceChanged(
            f"{found.uri} is now version {found.id}, not {version}; open it without version= to go on with what is there"
        )
    path = f"{home}/catalogs/{found.id}.lmdb"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not _is_complete(path):
        build(found, path, sources, DirectBytes(sources), lambda done, total: None)
    return found.id, path


def _is_complete(path: str) -> bool:
    try:
        Catalog.open(path)
    except (FileNotFoundError, CorruptData):
        return False
    return True


def _home() -> str:
    """The folder of catalogs built by this user: in $XDG_CACHE_HOME or ~/.cache, else in the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = f"{base}/cachesvc"
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
    except OSError:
        home = f"{tempfile.gettempdir()}/cachesvc-{os.getuid()}"
        os.makedirs(home, mode=0o700, exist_ok=True)
    return home
