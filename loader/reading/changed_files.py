"""Local files that are read where they lie: one that was written to since it was opened is found out within a second, and
what is held of it goes back. Who asks for that again hears of it (`local_files.py`).
"""

from __future__ import annotations

import os
import time

from cachesvc.catalog.catalog import Catalog
from cachesvc.core.model import ObjectVersion
from loader.reading.lease_table import ORIGINS, Leases
from loader.reading.local_files import changed, local_path, written_to

LOOK_S = 1.0
"""As often as a daemon's recalls are heard; a look at 256 files takes 0.3 ms."""
_LOCAL = ORIGINS.index("local")


class ChangedFiles:
    """Of one reader. Safe to share between threads."""

    def __init__(self, catalog: Catalog, leases: Leases) -> None:
        self._catalog, self._leases = catalog, leases
        self._known: dict[int, ObjectVersion] = {}
        """Of the extents that were held at the latest look."""
        self._look_at = 0.0

    def look(self) -> None:
        """Before a read asks for extents: once a second what was written to goes back."""
        now = time.monotonic()
        if now >= self._look_at:
            self._look_at = now + LOOK_S
            self._give_back()

    def must_stand(self) -> None:
        """After a read that failed. Raises SourceChanged where a file was written to."""
        uri = self._give_back()
        if uri:
            raise changed(local_path(uri) or uri)

    def _give_back(self) -> str:
        """What is held of files that were written to. Returns one of those."""
        with self._leases.kept_files(self._leases.held) as files:
            local = {extent: held.fd for extent, held in files.items() if held.origin == _LOCAL}
            known = {extent: self._known.get(extent) or self._version(extent) for extent in local}
            wrong = [extent for extent, fd in local.items() if written_to(os.fstat(fd), known[extent])]
        self._known = known
        if not wrong:
            return ""
        self._leases.forgo(wrong)
        return known[wrong[0]].uri

    def _version(self, extent: int) -> ObjectVersion:
        return self._catalog.extent(extent).pieces[0].object
