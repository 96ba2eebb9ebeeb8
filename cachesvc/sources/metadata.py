"""Listings and HEADs kept on disk with expiry, so that a thousand openings cost one LIST.

diskcache keeps them, through a Disk of our own that refuses pickles: JSONDisk still unpickles a row that
somebody tampered with, and what lies in a cache directory is not trusted here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import diskcache
from diskcache.core import MODE_BINARY, MODE_RAW, MODE_TEXT, UNKNOWN

from cachesvc.core.errors import CorruptData
from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import Source

EXPIRY_S = 600.0
SIZE_LIMIT_BYTES = 1 << 30


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
    exists is kept: a missing object is looked for again.
    """

    def __init__(self, source: Source, directory: Path, expiry_s: float = EXPIRY_S) -> None:
        self._source = source
        self._expiry_s = expiry_s
        self._cache = diskcache.Cache(
            str(directory), disk=TextDisk, size_limit=SIZE_LIMIT_BYTES, tag_index=True, statistics=0
        )

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """As the source's, at most `expiry_s` old."""
        kept = self._cache.get("list " + prefix)
        if kept is not None:
            yield from (_version(row) for row in _rows(kept))
            return
        rows = []
        for version in self._source.list(prefix):
            rows.append([version.uri, version.size_bytes, version.etag])
            yield version
        self._cache.set("list " + prefix, json.dumps(rows), expire=self._expiry_s, tag=_tag(prefix))

    def head(self, uri: str) -> ObjectVersion:
        """As the source's, at most `expiry_s` old."""
        kept = self._cache.get("head " + uri)
        if kept is not None:
            return _version(_rows(kept))
        version = self._source.head(uri)
        row = json.dumps([version.uri, version.size_bytes, version.etag])
        self._cache.set("head " + uri, row, expire=self._expiry_s, tag=_tag(uri))
        return version

    def read_into(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        """The source's."""
        self._source.read_into(version, offset, into)

    def forget(self, prefix: str) -> int:
        """Drop the listings and HEADs that `prefix` may have a part in; answers how many were dropped."""
        return int(self._cache.evict(_tag(prefix)))

    def close(self) -> None:
        """Close the cache and the source."""
        self._cache.close()
        self._source.close()


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
