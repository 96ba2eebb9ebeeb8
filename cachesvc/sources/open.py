"""Opens the source of a URI, with retries, counters and cached listings around it."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from cachesvc.config import SourceSection, requester_pays, section_of
from cachesvc.core.errors import SourceUnavailable, fault_of_node
from cachesvc.core.limits import OPEN_S
from cachesvc.core.model import ObjectVersion
from cachesvc.core.rates.hedge_budget import HEDGE_SHARE
from cachesvc.sources.files import FilesSource
from cachesvc.sources.limited_calls import SharedCalls
from cachesvc.sources.metadata import EXPIRY_S, CachedMetadata
from cachesvc.sources.paces import Paces, SharedHedges, SharedPace
from cachesvc.sources.resilient import Resilience, Resilient
from cachesvc.sources.source import Checker, OnReceived, Source, ignore_received
from cachesvc.sources.timed_reads import SourceCounters
from cachesvc.sources.uri import expanded
from cachesvc.sources.watched import CallWatch, WatchedSource

log = logging.getLogger(__name__)


class MappedSource:
    """A `Source` of the URIs below `prefix`, such as a bucket that is mounted, read below `target` of another source. Both
    end in a slash."""

    def __init__(self, source: Source, prefix: str, target: str) -> None:
        self._source, self._prefix, self._target = source, prefix, target
        self.close = source.close

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """List the other source, with URIs of this one."""
        return map(self._named, self._source.list(self._moved(prefix)))

    def head(self, uri: str) -> ObjectVersion:
        """Return the object's current version."""
        return self._named(self._source.head(self._moved(uri)))

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Read a range of the other source."""
        self._source.read_into(self._placed(version), offset, into, received)

    def checker(self, version: ObjectVersion) -> Checker | None:
        """Return the other source's checker."""
        return self._source.checker(self._placed(version))

    def _moved(self, uri: str) -> str:
        return self._target + uri.removeprefix(self._prefix.removesuffix("/")).removeprefix("/")

    def _placed(self, version: ObjectVersion) -> ObjectVersion:
        return replace(version, uri=self._moved(version.uri))

    def _named(self, version: ObjectVersion) -> ObjectVersion:
        return replace(version, uri=self._prefix + version.uri.removeprefix(self._target))


@dataclass(frozen=True, slots=True)
class SourceSettings:
    """Settings of all sources. Picklable, so that a filler process can open its own.

    `roots`: real paths that files must lie under (`Allowlist.roots`); empty allows all. `metadata_directory`: where
    listings and HEADs are cached; None caches none. `paces`: the descriptor of `Paces` that this process inherits; -1 for
    none. `hedge_share`: the bytes that may be asked for twice, as a part of all. `sections`: how objects below some
    prefixes are read.
    """

    resilience: Resilience = field(default_factory=Resilience)
    roots: tuple[str, ...] = ()
    metadata_directory: Path | None = None
    metadata_expiry_s: float = EXPIRY_S
    paces: int = -1
    hedge_share: float = HEDGE_SHARE
    sections: tuple[SourceSection, ...] = ()


def _opened(
    uri: str,
    section: SourceSection,
    settings: SourceSettings,
    calls: CallWatch | None,
    paces: Paces,
    hedges: SharedHedges,
) -> tuple[Resilient, str]:
    """Open the source of all URIs below the prefix of a section, with retries and counters.

    Also returns its endpoint when URIs alone do not identify objects, else "". Calls on files have no timeout, so they are
    registered in `calls`. Raises InvalidInput for a scheme that cannot be read, NotAllowed without credentials.
    """
    scheme, mark, _ = uri.partition("://")
    backend: Source
    endpoint, resilience = "", settings.resilience
    watch = calls or CallWatch()
    if section.path:
        root = os.path.realpath(section.path)
        files = WatchedSource(FilesSource((root,), watch.heartbeat), watch)
        backend = MappedSource(files, section.prefix, f"file://{root.rstrip('/')}/")
    elif not mark or scheme == "file":
        backend = WatchedSource(FilesSource(settings.roots, watch.heartbeat), watch)
    elif scheme == "s3":
        from cachesvc.sources.s3.s3 import (
            open_s3,  # boto3 takes 9 MB and 0.2 s, and a trainer seldom needs it
        )

        backend = storage = open_s3(section)
        endpoint = storage.endpoint
        if requester_pays(section):
            resilience = replace(resilience, hedge=False)
    elif scheme in ("http", "https"):
        from cachesvc.sources.web.files import WebSource

        backend = WebSource()
    elif scheme == "hf":
        from cachesvc.sources.web.hub import open_hub

        backend = hub = open_hub()
        endpoint = hub.endpoint
    else:
        from cachesvc.sources.remote import open_fsspec

        backend = open_fsspec(uri)
    # Files refuse nothing, and a shared pace costs 0.1 ms of CPU time a read.
    unlimited = _reads_files(section) and not section.requests_per_s
    pace = SharedPace() if unlimited else paces(section.prefix, section.requests_per_s or math.inf)
    bytes_pace = paces(f"bytes of {section.prefix}", section.bytes_per_s) if section.bytes_per_s else None
    return Resilient(backend, resilience, pace=pace, bytes_pace=bytes_pace, hedges=hedges), endpoint


def _with_cached_metadata(
    reader: Resilient, endpoint: str, section: SourceSection, settings: SourceSettings
) -> Source:
    """Wrap the reader in cached listings and HEADs when the settings name a directory for them. Files need none."""
    if settings.metadata_directory is None or _reads_files(section):
        return reader
    return CachedMetadata(reader, settings.metadata_directory, settings.metadata_expiry_s, endpoint=endpoint)


def _reads_files(section: SourceSection) -> bool:
    """Tell whether a section is read from files of this machine, perhaps of a network file system."""
    return bool(section.path) or section.prefix.partition("://")[0] in ("", "file")


class Sources:
    """The open sources of a process, one for each scheme and host, and for each section. Thread-safe."""

    def __init__(
        self, settings: SourceSettings, calls: CallWatch | None = None, open_s: float = OPEN_S
    ) -> None:
        self._settings, self._calls, self._paces = settings, calls, Paces(settings.paces)
        self._hedges = self._paces.hedges(settings.hedge_share)
        self._open_s = open_s
        self._opened: dict[str, tuple[Resilient, Source]] = {}
        self._opening = SharedCalls[tuple[Resilient, Source]]("open")
        self._readers: list[Resilient] = []

    def __call__(self, uri: str) -> Source:
        """Return the source that reads this URI; opens it first if need be. Raises InvalidInput, NotAllowed, and
        SourceUnavailable where a credential helper or a driver hangs."""
        return self._at(uri)[1]

    def metadata(self, uri: str) -> CachedMetadata | None:
        """Return the cached metadata of the source that reads this URI; None where none is cached. Raises as a call
        does."""
        source = self(uri)
        return source if isinstance(source, CachedMetadata) else None

    def probe(self, prefix: str) -> None:
        """Send the first request of a listing, once. Raises its error, and as a call does."""
        self._at(prefix)[0].probe(prefix)

    def silent_s(self, uri: str, since: float) -> float:
        """Return for how many seconds the source that reads this URI has left its callers without an answer. See
        `Resilient.silent_s`. Raises as a call does."""
        return self._at(uri)[0].silent_s(since)

    def _at(self, uri: str) -> tuple[Resilient, Source]:
        """Return the reader and the source of a URI. Foreign code runs on a thread of its own and under no lock: a
        credential helper that hangs delays only the places that it is asked for."""
        section = section_of(uri, self._settings.sections)
        place = section.prefix
        if place in self._opened:
            return self._opened[place]
        opening = self._opening.of(place, self._open_s, partial(self._open, uri, section))
        try:
            return opening.result_within(self._open_s, partial(self._hangs, uri, section))
        finally:
            self._opening.forget(place, opening)

    def _open(self, uri: str, section: SourceSection) -> tuple[Resilient, Source]:
        place = section.prefix
        if place not in self._opened:  # a call that began just before this one may have opened it
            reader, endpoint = _opened(uri, section, self._settings, self._calls, self._paces, self._hedges)
            self._readers.append(reader)
            self._opened[place] = reader, _with_cached_metadata(reader, endpoint, section, self._settings)
        return self._opened[place]

    def _hangs(self, uri: str, section: SourceSection) -> SourceUnavailable:
        error = fault_of_node(f"{uri}: {_foreign(section)} has not answered for {self._open_s:.0f} s")
        log.error("%s", error)
        return error

    def give_up(self, threads: Collection[int]) -> None:
        """Make the calls of all sources fail that run in threads. See `Resilient.give_up`."""
        for reader in tuple(self._readers):
            reader.give_up(threads)

    def counters(self) -> SourceCounters:
        """Return the counts of all sources together."""
        return sum((reader.counters for reader in tuple(self._readers)), SourceCounters())

    def expand(self, uris: Sequence[str]) -> list[str]:
        """Expand brace ranges and globs; see `expanded`."""
        return expanded(uris, self)

    def forget(self, uri: str) -> None:
        """Drop the cached listings that may contain a URI."""
        metadata = self.metadata(uri)
        if metadata is not None:
            metadata.forget(uri)


def _foreign(section: SourceSection) -> str:
    """Return the name of the foreign code that opens a source."""
    if section.path:
        return f"the file system of {section.path}"
    scheme = section.prefix.partition("://")[0]
    if scheme == "s3":
        from cachesvc.sources.s3.identity import helper

        return helper(section.profile)
    return f"the driver of {scheme}://"
