"""Caches listings and HEADs on disk until they expire, so that a thousand openings cost one LIST.

diskcache stores them through our own Disk, which refuses pickles: files in a cache directory are not trusted, and
JSONDisk would unpickle a row that was tampered with.

The cache is never needed: when its disk is full, read-only or gone, or another process keeps it locked, each request
goes to the source. A damaged one is replaced.
"""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import diskcache
from diskcache.core import MODE_BINARY, MODE_RAW, MODE_TEXT, UNKNOWN
from xxhash import xxh3_64_hexdigest

from cachesvc.core.errors import CorruptData, NotFound, SourceChanged
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import Checker, OnReceived, Source, ignore_received

log = logging.getLogger(__name__)
EXPIRY_S = 600.0
SIZE_LIMIT_BYTES = 1 << 30
LOCKED_S = 2.0
"""How long a call waits for other processes, which each write a few rows."""
_DAMAGED = (CorruptData, sqlite3.Error, AttributeError, KeyError, TypeError, ValueError)
"""Errors of diskcache's calls on a file that is no database, on settings that are not its own, and on rows that are not
ours."""
_PASSING = (OSError, sqlite3.OperationalError, diskcache.Timeout)
"""Errors of the disk or of a lock, and not of the file."""
_FAILED = (*_DAMAGED, *_PASSING)
_T = TypeVar("_T")


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
            raise CorruptData("the metadata cache holds a key that is not text")
        return key

    def store(self, value: object, read: bool, key: object = UNKNOWN) -> Any:
        """Return the columns of a value, which must be text or bytes."""
        if type(value) not in (str, bytes) or read:
            raise CorruptData(f"a metadata value must be text or bytes, not {type(value).__name__}")
        return super().store(value, read, key)

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> Any:
        """Return the value of columns; never unpickles, and reads no file outside the cache's directory."""
        if mode not in (MODE_RAW, MODE_BINARY, MODE_TEXT) or read:
            raise CorruptData("the metadata cache holds something else than text")
        if filename is not None and (filename.startswith("/") or ".." in filename):
            raise CorruptData("the metadata cache names a file outside itself")
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
        self._unused_until = 0.0
        """Until then the source is asked, since the rows may be old, or each call would wait for a lock."""

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """List the source, or return its listing of at most `expiry_s` ago."""
        key = f"list {self._endpoint_key}{prefix}"
        kept = self._load(key, _versions)
        if kept is not None:
            yield from kept
            return
        rows = []
        for version in self._source.list(prefix):
            rows.append([version.uri, version.size_bytes, version.etag])
            yield version
        self._store(key, rows, prefix)

    def head(self, uri: str) -> ObjectVersion:
        """Return the object's version, at most `expiry_s` old."""
        key = f"head {self._endpoint_key}{uri}"
        kept = self._load(key, _version)
        if kept is not None:
            return kept
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
        """Drop the listings and HEADs that may contain objects below `prefix`; returns their number. Where they cannot be
        dropped, this object uses none until they have expired."""
        dropped = self._attempt(
            lambda cache: int(cache.evict(_tag(prefix))), "listings cannot be dropped", needed=True
        )
        return dropped or 0

    def note(self, key: str, text: str, keep_s: float) -> None:
        """Keep a text, which `forget` does not drop."""
        self._attempt(
            lambda cache: cache.set(f"note {self._endpoint_key}{key}", text, expire=keep_s),
            "what was opened is not kept",
        )

    def noted(self, key: str) -> str:
        """Return the text that was kept last under this key; "" for none."""
        found = self._attempt(
            lambda cache: cache.get(f"note {self._endpoint_key}{key}"), "what was opened is not known"
        )
        return found if isinstance(found, str) else ""

    def close(self) -> None:
        """Close the cache and the source."""
        self._close()
        self._source.close()

    @contextmanager
    def _forgetting(self, version: ObjectVersion) -> Iterator[None]:
        try:
            yield
        except (SourceChanged, NotFound):
            self.forget(version.uri)
            raise

    def _load(self, key: str, parse: Callable[[object], _T]) -> _T | None:
        """Return the value of a row that has not expired; None for no row. A row that expires later than one written now
        dates from before the clock was set back, so its age is unknown: None, too."""

        def load(cache: diskcache.Cache) -> _T | None:
            kept, ends_at = cache.get(key, expire_time=True)
            young = ends_at is not None and ends_at <= self._clock() + self._expiry_s
            return parse(_json(kept)) if young else None

        return self._attempt(load, "kept listings cannot be read; the source is asked")

    def _store(self, key: str, value: object, uri: str) -> None:
        def store(cache: diskcache.Cache) -> None:
            cache.set(key, json.dumps(value), expire=self._expiry_s, tag=_tag(uri))

        self._attempt(store, "a listing is not kept")

    def _attempt(self, call: Callable[[diskcache.Cache], _T], failed: str, needed: bool = False) -> _T | None:
        """Return what a call of the cache returns; None, and log `failed`, where it fails. The next call opens the cache
        anew: its directory may have been removed. `needed`: without the call the rows are not to be used."""
        if self._clock() < self._unused_until and not needed:
            return None
        try:
            return call(self._cache())
        except _FAILED as error:
            log.warning(failed, extra={"directory": str(self._directory), "error": str(error)})
            self._close()
            if not isinstance(error, _PASSING):
                shutil.rmtree(self._directory, ignore_errors=True)
                log.warning("the kept listings were damaged; new ones take their place")
            elif needed or isinstance(error, diskcache.Timeout) or "locked" in str(error):
                self._unused_until = self._clock() + self._expiry_s
            return None

    def _cache(self) -> diskcache.Cache:
        if self._opened is None:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # diskcache tries for a minute to open a file that is locked.
            with closing(sqlite3.connect(self._directory / "cache.db", LOCKED_S)) as rows:
                rows.execute("BEGIN IMMEDIATE")
            self._opened = diskcache.Cache(
                str(self._directory),
                LOCKED_S,
                disk=TextDisk,
                size_limit=SIZE_LIMIT_BYTES,
                tag_index=True,
                statistics=0,
            )
        return self._opened

    def _close(self) -> None:
        found, self._opened = self._opened, None
        if found is not None:
            with suppress(*_FAILED):
                found.close()


def _tag(uri: str) -> str:
    """Return the bucket or the top folder: coarse, so that forgetting a prefix also drops listings that contain it."""
    scheme, mark, rest = uri.partition("://")
    top = (rest if mark else scheme).strip("/").split("/", 1)[0]
    return f"{scheme if mark else 'file'}://{top}"


def _json(text: object) -> object:
    try:
        return json.loads(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _versions(rows: object) -> list[ObjectVersion]:
    if not isinstance(rows, list):
        raise CorruptData("a row is not ours")
    return [_version(row) for row in rows]


def _version(row: object) -> ObjectVersion:
    match row:
        case [str(uri), int(size), str(etag)]:
            return ObjectVersion(uri, size, etag)
    raise CorruptData("a row is not ours")
