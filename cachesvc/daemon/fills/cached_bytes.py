"""A builder's reads of data without an index, as an ordinary reader of this daemon.

The fills that index a dataset thus also cache it, and no byte is fetched twice. Extents that no tier has room for, or
that a disk cannot read, are read from the source.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cachesvc.catalog.build import provisional
from cachesvc.catalog.compiler import ExtentBytes
from cachesvc.catalog.survey import Survey
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.protocol import Refused
from cachesvc.core.limits import FILL_S as FILL_TIMEOUT_S
from cachesvc.core.model import Extent
from cachesvc.core.order.epoch_order import Plan
from cachesvc.sources.watched import CallWatch

log = logging.getLogger(__name__)


@dataclass(eq=False)
class CachedBytes:
    """`ExtentBytes` through the grants socket. A context manager, which removes the provisional catalog.

    Reads of copies are watched by `calls`, since a disk may hang.
    """

    _socket_dir: str
    _catalogs: str
    _survey: Survey
    _direct: ExtentBytes
    _calls: CallWatch
    _path: str = ""
    _grants: DaemonGrants | None = None
    _held: int = -1
    _fd: int = -1

    def __enter__(self) -> CachedBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._release()
        if self._grants is not None:
            self._grants.close()
            Path(self._path).unlink(missing_ok=True)

    def declare(self, extents: Sequence[Extent]) -> None:
        """Declare the extents to the daemon as a dataset without samples, and plan to read each once."""
        dataset = provisional(self._survey, extents, self._catalogs)
        self._path = f"{self._catalogs}/{dataset}.lmdb"
        steps = np.arange(len(extents))
        self._grants = DaemonGrants(self._socket_dir, dataset)
        self._direct.declare(extents)
        self._grants.submit(Plan(steps, steps, steps))

    def read(self, extent: int, offset: int, length: int) -> bytes:
        """Read bytes of an extent, which is filled if need be. Raises the CacheError of a fill that failed."""
        if extent != self._held:
            self._acquire(extent)
        if self._fd >= 0:
            try:
                with self._calls.watching(f"the cached copy of a part of {self._survey.uri}"):
                    return os.pread(self._fd, length, offset)
            except OSError as error:
                log.warning("a copy cannot be read", extra={"error": error.strerror})
                self._release()
        self._held = extent
        return self._direct.read(extent, offset, length)

    def _acquire(self, extent: int) -> None:
        assert self._grants is not None, "declare comes first"
        self._release()
        self._grants.passed(extent)
        (answer,) = self._grants.acquire([extent], FILL_TIMEOUT_S)
        if isinstance(answer, Refused):
            return
        self._held, self._fd = extent, answer.fd
        if answer.holes:  # a direct read of a hole raises that object's own error
            self._release()

    def _release(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            assert self._grants is not None
            self._grants.release([self._held])
        self._held, self._fd = -1, -1
