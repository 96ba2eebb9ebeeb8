"""Listings and HEADs kept on disk with expiry, so that a thousand openings cost one LIST.

diskcache keeps them, through a Disk of our own that refuses pickles: JSONDisk still unpickles a row that
somebody tampered with, and what lies in a cache directory is not trusted here.

They save requests, no more: where the disk is full, read-only or gone, the source is asked each time.
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
from cachesvc.sources.source import Checker, Source

log = logging.getLogger(__name__)
EXPIRY_S = 600.0
SIZE_LIMIT_BYTES = 1 << 30
_FAILED = (OSError, sqlite3.Error, diskcache.Timeout)
"""What a disk in trouble makes of diskcache's calls, or a file on it that is no database."""


class TextDisk(diskcache.Disk):  # type: ignore[misc]
    """A diskcache Disk for text and bytes alone: whatever else is asked or found raises CorruptData."""

    def put(self, key: object) -> Any:
        """Key -> column. Text only."""
        if type(key) is not str:
            raise CorruptData(f"a metadata key must be text, not {type(key).__name__}")
        return key, True

    def get(self, key: object, raw: object) -> Any:
        """Column -> key, never unpickled."""
        if not raw or type(key) is not str:
            raise CorruptData(f"the metadata cache holds a key that is not text; delete {self._directory}")
        return key

    def store(self, value: object, read: bool, key: object = UNKNOWN) -> Any:
        """Value -> columns. Text or bytes only."""
        if type(value) not in (str, bytes) or read:
            raise CorruptData(f"a metadata value must be text or bytes, not {type(value).__name__}")
        return super().store(value, read, key)

    def fetch(self, mode: int, filename: str | None, value: object, read: bool) -> Any:
        """Columns -> value, never unpickled; files only of the name that we give them."""
        if mode not in (MODE_RAW, MODE_BINARY, MODE_TEXT) or read:
            raise CorruptData(f"the metadata cache holds something else than text; delete {self._directory}")
        if filename is not None and (filename.startswith("/") or ".." in filename):
            raise CorruptData(f"the metadata cache names a file outside itself; delete {self._directory}")
        return super().fetch(mode, filename, value, read)


class CachedMetadata:
    """A `Source` whose `list` and `head` answer from disk until `expiry_s`; reads pass through.

    A listing is kept once it is complete. `forget(prefix)` drops what is known about a prefix. Only what
    exists is kept: a missing object is looked for again, and what a read finds changed is forgotten.
    """

    def __init__(
        self,
        source: Source,
        directory: Path,
        expiry_s: float = EXPIRY_S,
        clock: Callable[[], float] = time.time,
        endpoint: str = "",
    ) -> None:
        """`clock` must be of the kind that diskcache uses: rows outlive processes, and machines' restarts.
        `endpoint`: what else than their URIs tells listings apart; what is kept of one is not another's."""
        self._source = source
        self._directory = directory
        self._expiry_s = expiry_s
        self._clock = clock
        # A digest: an endpoint's URL can hold a password.
        self._endpoint_key = f"{xxh3_64_hexdigest(endpoint.encode())} " if endpoint else ""
        self._opened: diskcache.Cache | None = None

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """As the source's, at most `expiry_s` old."""
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
        """As the source's, at most `expiry_s` old."""
        key = f"head {self._endpoint_key}{uri}"
        kept = self._load(key)
        if kept is not None:
            return _version(_rows(kept))
        version = self._source.head(uri)
        self._store(key, [version.uri, version.size_bytes, version.etag], uri)
        return version

    def read_into(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        """The source's. What turns out to have changed since it was listed is listed anew by whoever opens it next."""
        with self._forgetting(version):
            self._source.read_into(version, offset, into)

    def checker(self, version: ObjectVersion) -> Checker | None:
        """The source's; what has changed is listed anew, as after a read."""
        with self._forgetting(version):
            return self._source.checker(version)

    def forget(self, prefix: str) -> int:
        """Drop the listings and HEADs that `prefix` may have a part in; answers how many were dropped. Raises
        OutOfSpace where they cannot be dropped."""
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
            with suppress(OutOfSpace):  # it expires by itself
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
        """What a row holds that is young enough. One that ends later than any written now was written before the
        clock was set back, who knows when."""
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
    """The bucket, or the top folder: coarse, so that forgetting a prefix also forgets what contains it."""
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
