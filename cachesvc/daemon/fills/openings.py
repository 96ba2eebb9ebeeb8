"""Resolves the URIs of a build to a dataset version: the kept one that is named, the one that the source has now, or,
while the source is down, the one that was opened last."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial

from xxhash import xxh3_128_hexdigest

from cachesvc.catalog.expiry import mark_used
from cachesvc.catalog.options import Options
from cachesvc.catalog.pinned import kept_version
from cachesvc.catalog.survey import Survey, survey
from cachesvc.core.errors import CacheError, SourceUnavailable
from cachesvc.core.limits import STALE_AFTER_S
from cachesvc.core.model import DatasetId
from cachesvc.daemon.processes.jobs import BuildJob
from cachesvc.sources.limited_calls import LimitedCall
from cachesvc.sources.open import Sources
from cachesvc.sources.uri import expanded

WATCH_S = 0.5
MOST_VERSIONS = 8
"""Versions of one dataset that are remembered. Nodes that opened it at different times may have an older one in common."""


@dataclass(frozen=True, slots=True)
class KeptVersion:
    """A version whose catalog is kept. `listed_at`: when the source was last found to have it, in seconds of Unix time; 0
    where the caller names the version, which is not compared with the source. `before`: earlier versions that are kept, the
    newest first. `why`: the error of the source."""

    id: DatasetId
    listed_at: int = 0
    before: tuple[DatasetId, ...] = ()
    why: str = ""


@dataclass(eq=False)
class Openings:
    """The openings of a builder. Thread-safe. While a source is down, the version that was opened last is opened instead,
    unless its listing is older than `stale_s` seconds; 0 turns this off. A source is down after `after_s` seconds without
    an answer."""

    _sources: Sources
    _stale_s: float
    _after_s: float = STALE_AFTER_S
    _clock: Callable[[], float] = time.time

    def find(self, job: BuildJob) -> Survey | KeptVersion:
        """Return the version that the job opens. Raises what listing the source raises."""
        options = job.options
        if job.refresh:
            for uri in job.uris:
                self._sources.forget(uri)
        elif kept_version(job.catalogs, job.version, job.uris, options):
            return KeptVersion(DatasetId(job.version))
        last = self._last(job)
        if last is None:
            return self._list(job, options)
        try:
            return self._list_unless_down(job, options)
        except SourceUnavailable as error:
            if error.of_node:
                raise
            return replace(last, why=str(error))

    def opened(self, job: BuildJob, version: str) -> None:
        """Remember the version that the source has now."""
        metadata = self._sources.metadata(job.uris[0])
        if metadata is not None and self._stale_s:
            before = [row for row in _rows(metadata.noted(_key(job))) if row[0] != version]
            rows = [(version, int(self._clock())), *before][:MOST_VERSIONS]
            metadata.note(_key(job), json.dumps(rows), self._stale_s)

    def _list(self, job: BuildJob, options: Options) -> Survey:
        return survey(expanded(job.uris, self._sources), options, self._sources)

    def _list_unless_down(self, job: BuildJob, options: Options) -> Survey:
        """List the source. Raises SourceUnavailable once one of the job's sources is silent for `after_s`."""
        since = time.monotonic()
        listing = LimitedCall(partial(self._list, job, options), "listing")
        while not listing.ends_within(WATCH_S):
            for uri in job.uris:
                if self._sources.silent_s(uri, since) >= self._after_s:
                    raise SourceUnavailable(f"{uri}: the source has not answered for {self._after_s:.0f} s")
        return listing.result()

    def _last(self, job: BuildJob) -> KeptVersion | None:
        """Return the version that was opened last, if its catalog is still there."""
        with suppress(CacheError):  # the listing raises it
            metadata = self._sources.metadata(job.uris[0])
            rows = _rows(metadata.noted(_key(job))) if metadata is not None and self._stale_s else []
            oldest_at = self._clock() - self._stale_s
            kept = [
                (DatasetId(version), listed_at)
                for version, listed_at in rows
                if oldest_at <= listed_at <= self._clock() and mark_used(f"{job.catalogs}/{version}.lmdb")
            ]
            if kept and kept[0][0] == rows[0][0] and job.version in ("", rows[0][0]):
                return KeptVersion(*kept[0], tuple(version for version, _ in kept[1:]))
        return None


def _rows(text: str) -> list[tuple[str, int]]:
    """Return the versions that were noted, and when each was listed."""
    try:
        return [(str(version), int(listed_at)) for version, listed_at in json.loads(text or "[]")]
    except (ValueError, TypeError):
        return []


def _key(job: BuildJob) -> str:
    return (
        f"opened {xxh3_128_hexdigest(json.dumps([job.uris, asdict(job.options)], sort_keys=True).encode())}"
    )
