"""Caches listings and HEADs on disk until they expire, so that a thousand openings cost one LIST.

diskcache stores them through our own Disk, which refuses pickles: files in a cache directory are not trusted, and
JSONDisk would unpickle a row that was tampered with.

When the disk is full, read-only or gone, each request goes to the source.
"""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_BINARY, MODE_RAW, MODE_TEXT, UNKNOWN
from xxhash import xxh3_64_hexdigest

from cachesvc.core.errors import CorruptData, NotFound, OutOfSpace, SourceChanged
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import Checker, OnReceived, Source, ignore_received

log = logging.getLogger(__name__)
EXPIRY_S = 600.0
SIZE_LIMIT_BYTES = 1 << 30
_FAILED = (OSError, sqlite3.Error, diskcache.Timeout)
"""Errors of diskcache's calls on a failing disk, or on a file that is no database."""


class TextDisk(diskcache.Disk):  # type: ignore[misc]
    """A diskcache Disk of text and bytes alone. Anything else raises CorruptData."""

    def put(self, key: object) -> Any:
        """Return the column of a key, which must be text."""
        if type(key) is not str:
            raise CorruptData(f"a metadata key must be text, not {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> Any:
        """Return the key of a column; never unpickles."""
        if not raw or type(key) is not str:
            raise CorruptData(f"the metadata cache holds a key that is not text; delete {self._directory}")
        return key

    def store(self, value: object, read: bool, key: object = UNKNOWN) -> Any:
        """Return the columns of a value, which must be text or bytes."""
        if type(value) not in (str, bytes) or read:
            raise CorruptData(f"a metadata value must be text or bytes, not {type(value).__name__}")
        return super().store(value, read, key)

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> Any:
        """Return the value of columns; never unpickles, and reads no file outside the cache's directory."""
        if mode not in (MODE_RAW, MODE_BINARY, MODE_TEXT) or read:
            raise CorruptData(f"the metadata cache holds something else than text; delete {self._directory}")
        if filename is not None and (filename.startswith("/") or ".." in filename):
            raise CorruptData(f"the metadata cache names a file outside itself; delete {self._directory}")
        return super().fetch(mode, filename, value, read)


class CachedMetadata:
    """A `Source` that caches `list` and `head` on disk for `expiry_s`; reads pass through.

    A listing is stored once it is complete. Missing objects are not cached. A read that finds an object changed or missing
    drops the listings and HEADs that it may be part of.
    """

    def __init__(
        self,
        source: Source,
        directory: Path,
        expiry_s: float = EXPIRY_S,
        clock: Callable[[], float] = time.time,
        endpoint: str = "",
    ) -> None:
        """`clock` must agree with diskcache's, which is the system's time: rows outlive processes and restarts of the
        machine. `endpoint` tells listings of the same URIs apart."""
        self._source = source
        self._directory = directory
        self._expiry_s = expiry_s
        self._clock = clock
        # A digest, since an endpoint's URL can contain a password.
        self._endpoint_key = f"{xxh3_64_hexdigest(endpoint.encode())} " if endpoint else ""
        self._opened: diskcache.Cache | None = None

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """List the source, or return its listing of at most `expiry_s` ago."""
        key = f"list {self._endpoint_key}{prefix}"
        kept = self._load(key)
        if kept is not None:
            yield from (_version(row) for row in _rows(kept))
            return
        rows = []
        for version in self._source.list(prefix):
            rows.append([version.uri, version.size_bytes, version.etag])
            yield version
        self._store(key, rows, prefix)

    def head(self, uri: str) -> ObjectVersion:
        """Return the object's version, at most `expiry_s` old."""
        key = f"head {self._endpoint_key}{uri}"
        kept = self._load(key)
        if kept is not None:
            return _version(_rows(kept))
        version = self._source.head(uri)
        self._store(key, [version.uri, version.size_bytes, version.etag], uri)
        return version

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Read a range of the source. After SourceChanged or NotFound the next opening lists anew."""
        with self._forgetting(version):
            self._source.read_into(version, offset, into, received)

    def checker(self, version: ObjectVersion) -> Checker | None:
        """Return the source's checker. After SourceChanged or NotFound the next opening lists anew."""
        with self._forgetting(version):
            return self._source.checker(version)

    def forget(self, prefix: str) -> int:
        """Drop the listings and HEADs that may contain objects below `prefix`; returns their number. Raises OutOfSpace
        when the disk refuses."""
        try:
            return int(self._cache.evict(_tag(prefix)))
        except _FAILED as error:
            raise OutOfSpace(
                f"old listings in {self._directory} cannot be dropped ({error}); free room in the state directory,"
                " or make it writable again"
            ) from error

    def close(self) -> None:
        """Close the cache and the source."""
        if self._opened is not None:
            self._opened.close()
        self._source.close()

    @contextmanager
    def _forgetting(self, version: ObjectVersion) -> Iterator[None]:
        try:
            yield
        except (SourceChanged, NotFound):
            with suppress(OutOfSpace):  # the row expires anyway
                self.forget(version.uri)
            raise

    @property
    def _cache(self) -> diskcache.Cache:
        if self._opened is None:
            self._opened = diskcache.Cache(
                str(self._directory), disk=TextDisk, size_limit=SIZE_LIMIT_BYTES, tag_index=True, statistics=0
            )
        return self._opened

    def _load(self, key: str) -> object:
        """Return the value of a row that has not expired; None for no row. A row that expires later than one written now
        dates from before the clock was set back, so its age is unknown: None, too."""
        try:
            kept, ends_at = self._cache.get(key, expire_time=True)
        except _FAILED as error:
            log.warning("kept listings cannot be read; the source is asked", extra=self._log_extra(error))
            return None
        young = ends_at is not None and ends_at <= self._clock() + self._expiry_s
        return kept if young else None

    def _store(self, key: str, value: object, uri: str) -> None:
        try:
            self._cache.set(key, json.dumps(value), expire=self._expiry_s, tag=_tag(uri))
        except _FAILED as error:
            log.warning("a listing is not kept", extra=self._log_extra(error))

    def _log_extra(self, error: Exception) -> dict[str, str]:
        return {"directory": str(self._directory), "error": str(error)}


def _tag(uri: str) -> str:
    """Return the bucket or the top folder: coarse, so that forgetting a prefix also drops listings that contain it."""
    scheme, mark, rest = uri.partition("://")
    top = (rest if mark else scheme).strip("/").split("/", 1)[0]
    return f"{scheme if mark else 'file'}://{top}"


def _rows(text: object) -> list[Any]:
    try:
        rows = json.loads(text) if isinstance(text, str) else None
    except ValueError:
        rows = None
    if not isinstance(rows, list):
        raise CorruptData("the metadata cache holds a row that is not ours; delete its directory")
    return rows


def _version(row: object) -> ObjectVersion:
    match row:
        case [str(uri), int(size), str(etag)]:
            return ObjectVersion(uri, size, etag)
    raise CorruptData("the metadata cache holds a row that is not ours; delete its directory")
