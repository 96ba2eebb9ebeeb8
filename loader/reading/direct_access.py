"""Without a daemon: the catalog is compiled and the extents are filled by this process, with its own credentials."""

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
from cachesvc.catalog.survey import survey
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Grants
from cachesvc.core.errors import CorruptData, SourceChanged
from cachesvc.core.model import DatasetId, Extent
from cachesvc.core.order.epoch_order import Plan
from cachesvc.core.stalls import StallReport
from cachesvc.sources.fetch import Fetcher, written
from cachesvc.sources.open import Sources, SourceSettings
from loader.reading.direct_fills import DirectGrants
from loader.reading.local_files import LocalGrants
from loader.reading.shared_rate import direct_rate

DIRECT_THREADS = 8
"""Connections of one of the few fills at once of a process; the fillers of a daemon use more."""


def _report_nobody(report: StallReport) -> None:
    """Nobody keeps metrics here."""


def _suspect_nothing(extents: Sequence[int]) -> None:
    """Nothing here is cached in files."""


def _recall_nothing() -> Mapping[int, bool]:
    """Nobody asks for anything here."""
    return {}


@dataclass(frozen=True, slots=True)
class Access:
    """Extents for one process, and the places to say in which order they will be needed, what steps waited for, and
    which extents were granted wrong; `recalled` tells those that the daemon asks for, and whether they are. `another`
    makes a connection for the plan of an order that runs beside it."""

    grants: Grants
    submit: Callable[[Plan], None]
    report: Callable[[StallReport], None] = _report_nobody
    suspect: Callable[[Sequence[int]], None] = _suspect_nothing
    recalled: Callable[[], Mapping[int, bool]] = _recall_nothing
    another: Callable[[], DaemonGrants] | None = None


def reads_around(catalog: Catalog) -> Access:
    """Local files as they are, all else filled into this process's memory, in the order of the plan."""
    home = _home()
    settings = SourceSettings(metadata_directory=Path(home) / "metadata")
    sources, own = Sources(settings), threading.local()

    def fill(extent: Extent, fd: int) -> str:
        if not hasattr(own, "fetcher"):
            own.fetcher = Fetcher(sources, DIRECT_THREADS)  # one serves one thread
        return written(own.fetcher.fetch(extent, fd))

    direct = DirectGrants(catalog.extent, fill, direct_rate(home).take)

    def submit(plan: Plan) -> None:
        direct.plan(plan.extent.tolist())

    return Access(LocalGrants(catalog.extent, direct), submit)


def compile_here(uris: Sequence[str], options: Options, version: str) -> tuple[DatasetId, str]:
    """Compile a catalog, or find the one compiled before: its id and its path. Raises SourceChanged when the
    source is no longer at `version`."""
    home = _home()
    sources = Sources(SourceSettings(metadata_directory=Path(home) / "metadata"))
    found = survey(sources.spelled_out(uris), options, sources)
    if version and version != found.id:
        raise SourceChanged(
            f"{found.uri} is now version {found.id}, not {version}; open it without version= to go on with what is there"
        )
    path = f"{home}/catalogs/{found.id}.lmdb"
    os.makedirs(os.path.dirname(path), exist_ok=True)
    if not _whole(path):
        build(found, path, sources, DirectBytes(sources), lambda done, total: None)
    return found.id, path


def _whole(path: str) -> bool:
    try:
        Catalog.open(path)
    except (FileNotFoundError, CorruptData):
        return False
    return True


def _home() -> str:
    """Where catalogs built by this user are kept: $XDG_CACHE_HOME or ~/.cache, else the temporary folder."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    home = f"{base}/cachesvc"
    try:
        os.makedirs(home, mode=0o700, exist_ok=True)
    except OSError:
        home = f"{tempfile.gettempdir()}/cachesvc-{os.getuid()}"
        os.makedirs(home, mode=0o700, exist_ok=True)
    return home
