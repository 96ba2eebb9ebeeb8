"""Decorator of a `Source`: objects below a prefix that lie below another one, such as a bucket that is mounted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import Checker, OnReceived, Source, ignore_received


class MappedSource:
    """A `Source` of the URIs below `prefix`, read below `target` of another source. Both end in a slash."""

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
