"""How a builder reads data that has no index: as an ordinary reader of this daemon, so that the same fills
that index a dataset also cache it, and no byte is fetched twice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from cachesvc.catalog.build import Survey, provisional
from cachesvc.core.errors import OutOfSpace
from cachesvc.core.model import Extent
from cachesvc.core.order import Plan
from cachesvc.grants import Refused
from cachesvc.leases import DaemonGrants

FILL_TIMEOUT_S = 600.0
"""A source that retries and backs off may take minutes for one extent; the fill's own error comes first."""


class CachedBytes:
    """`ExtentBytes` through the grants socket. Context manager: leaves no provisional catalog behind."""

    def __init__(self, socket_dir: str, catalogs: str, survey: Survey) -> None:
        self._socket_dir = socket_dir
        self._catalogs = catalogs
        self._survey = survey
        self._path = ""
        self._grants: DaemonGrants | None = None
        self._held = -1
        self._fd = -1

    def __enter__(self) -> CachedBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._drop()
        if self._grants is not None:
            self._grants.close()
            Path(self._path).unlink(missing_ok=True)

    def declare(self, extents: Sequence[Extent]) -> None:
        """Make the extents known to the daemon, as a dataset without samples, and plan to read each once."""
        dataset = provisional(self._survey, extents, self._catalogs)
        self._path = f"{self._catalogs}/{dataset}.lmdb"
        steps = np.arange(len(extents))
        self._grants = DaemonGrants(self._socket_dir, dataset)
        self._grants.submit(Plan(steps, steps, steps))

    def read(self, extent: int, offset: int, length: int) -> bytes:
        """Bytes of an extent, filled when it was not. Raises the typed error of a fill that failed."""
        if extent != self._held:
            self._take(extent)
        return os.pread(self._fd, length, offset)

    def _take(self, extent: int) -> None:
        assert self._grants is not None, "declare comes first"
        self._drop()
        self._grants.passed(extent)
        (answer,) = self._grants.acquire([extent], FILL_TIMEOUT_S)
        if isinstance(answer, Refused):
            raise OutOfSpace(
                f"no room to index {self._survey.uri}: every tier is in use; raise --ram or --nvme"
            )
        self._held, self._fd = extent, answer.fd

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            assert self._grants is not None
            self._grants.release([self._held])
        self._held, self._fd = -1, -1
