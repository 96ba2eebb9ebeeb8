"""Finds local files that were written to after they were opened, within a second, and releases their extents. The next
request for such an extent raises SourceChanged (`direct_grants.py`).
"""

from __future__ import annotations

import os
import time

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.uri import local_path
from loader.reading.direct.direct_grants import changed, written_to
from loader.reading.held_extents import ORIGINS
from loader.reading.lease_table import Leases

CHECK_EVERY_S = 1.0
"""The interval at which recalls of a daemon are read, too; a check of 256 files takes 0.3 ms."""
_LOCAL = ORIGINS.index("local")


class ChangedFiles:
    """Checks the local files of one reader. Safe to share between threads."""

    def __init__(self, catalog: Catalog, leases: Leases) -> None:
        self._catalog, self._leases = catalog, leases
        self._versions: dict[int, ObjectVersion] = {}
        """By extent, for those held at the latest check."""
        self._check_at = 0.0

    def release_changed(self) -> None:
        """Release extents of changed files, at most once a second. Call this before a read requests extents."""
        now = time.monotonic()
        if now >= self._check_at:
            self._check_at = now + CHECK_EVERY_S
            self._release_changed()

    def raise_if_changed(self) -> None:
        """Raise SourceChanged where a file was changed. Call this after a read that failed."""
        uri = self._release_changed()
        if uri:
            raise changed(local_path(uri) or uri)

    def _release_changed(self) -> str:
        """Release extents of changed files; returns the URI of one of them, "" for none."""
        with self._leases.open_files(self._leases.held.by_index) as files:
            local = {extent: held.fd for extent, held in files.items() if held.origin == _LOCAL}
            versions = {extent: self._versions.get(extent) or self._version(extent) for extent in local}
            wrong = [extent for extent, fd in local.items() if written_to(os.fstat(fd), versions[extent])]
        self._versions = versions
        if not wrong:
            return ""
        self._leases.release_when_unused(wrong)
        return versions[wrong[0]].uri

    def _version(self, extent: int) -> ObjectVersion:
        return self._catalog.extent(extent).pieces[0].object
