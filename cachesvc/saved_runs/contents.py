"""Finds digests of the bytes of extents: those of a daemon's copies, or of what the source has."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from cachesvc.catalog.catalog import Catalog
from cachesvc.catalog.columns import Ints
from cachesvc.client.control import answers, find_daemon
from cachesvc.client.grants import DaemonGrants
from cachesvc.client.opening import read_timeout_s
from cachesvc.client.own_home import own_home
from cachesvc.client.protocol import Granted
from cachesvc.core.errors import DaemonUnavailable, NotFound
from cachesvc.core.model import DatasetId
from cachesvc.saved_runs.catalogs import connected
from cachesvc.saved_runs.run_data import Leaf
from cachesvc.sources.fetch import Fetcher
from cachesvc.sources.open import Sources, SourceSettings
from cachesvc.tiers.checksum import checksums_of

GROUP = 32
"""Extents that are asked for at once: more than a daemon fills at once."""


class Contents:
    """The digests of the bytes of datasets' extents. `fetches`: those that are not cached are fetched, through the daemon
    if there is one, and are read here otherwise."""

    def __init__(self, socket: str | None = None, fetches: bool = False) -> None:
        self._fetches = fetches
        directory = socket or find_daemon()
        self._directory = directory if directory is not None and answers(directory) else None
        self._known: dict[tuple[DatasetId, int], bytes] = {}

    def of(self, leaf: Leaf, extents: Ints) -> list[bytes]:
        """Return the digests of a dataset's extents. Raises NotFound for extents that are not cached, DaemonUnavailable
        where nothing is to be fetched and no daemon answers, and what reading raises."""
        keys = [(leaf.catalog.id, extent) for extent in extents.tolist()]
        wanted = [key[1] for key in keys if key not in self._known]
        if wanted and self._directory is not None:
            found = self._of_daemon(self._directory, leaf, wanted)
        elif wanted and self._fetches:
            found = _of_source(leaf.catalog, wanted)
        elif wanted:
            raise DaemonUnavailable(
                "no daemon answers, which would know digests of bytes: start one (cachesvc serve), or read the data here "
                "(--fetch)"
            )
        else:
            found = iter(())
        self._known.update(((leaf.catalog.id, extent), content) for extent, content in found)
        missing = sum(key not in self._known for key in keys)
        if missing:
            raise NotFound(
                f"{missing:,} of {len(extents):,} extents are not in the daemon's cache, so digests of their bytes "
                "are not known: fetch them first (cachesvc prefetch), or meanwhile (--fetch)"
            )
        return [self._known[key] for key in keys]

    def _of_daemon(self, directory: str, leaf: Leaf, extents: list[int]) -> Iterator[tuple[int, bytes]]:
        grants = DaemonGrants(directory, leaf.catalog.id, claims=False, fetches=self._fetches)
        try:
            connected(grants, directory, leaf.source)
            for start in range(0, len(extents), GROUP):
                for answer in grants.acquire(extents[start : start + GROUP], read_timeout_s()):
                    if isinstance(answer, Granted):
                        found = answer.content or checksums_of(answer.fd, 0, answer.size_bytes).content
                        os.close(answer.fd)
                        grants.release([answer.extent])
                        yield answer.extent, found
        finally:
            grants.close()


def _of_source(catalog: Catalog, extents: list[int]) -> Iterator[tuple[int, bytes]]:
    fetcher = Fetcher(Sources(SourceSettings(metadata_directory=Path(own_home()) / "metadata")))
    fd = os.memfd_create("cachesvc-digest", os.MFD_CLOEXEC)
    try:
        for index in extents:
            extent = catalog.extent(index)
            os.ftruncate(fd, 0)
            os.ftruncate(fd, extent.size_bytes)
            fetcher.fetch(extent, fd)
            yield index, checksums_of(fd, 0, extent.size_bytes).content
    finally:
        os.close(fd)
