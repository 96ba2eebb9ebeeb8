"""Reads of sources, and a base of fake ones."""

from __future__ import annotations

from collections.abc import Iterator

from cachesvc.core.model import ObjectVersion
from cachesvc.sources.source import OnReceived, Source, ignore_received


class FakeSource:
    """A `Source` without objects and checksums; a fake replaces what it is about."""

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        raise AssertionError("not asked")

    def head(self, uri: str) -> ObjectVersion:
        raise AssertionError("not asked")

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        raise AssertionError("not asked")

    def checker(self, version: ObjectVersion) -> None:
        pass

    def close(self) -> None:
        pass


def read(source: Source, version: ObjectVersion, offset: int = 0, size: int | None = None) -> bytes:
    """Return a range of an object; without a size, all bytes from the offset on."""
    into = bytearray(version.size_bytes - offset if size is None else size)
    source.read_into(version, offset, memoryview(into))
    return bytes(into)
