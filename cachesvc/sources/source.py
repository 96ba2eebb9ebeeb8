"""The seam to where the truth lies: S3, POSIX or NFS, anything fsspec opens, and (later) peers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from cachesvc.core.model import ObjectVersion

Checker = Callable[[Iterable[memoryview]], None]
"""Takes all bytes in order. Raises `SourceUnavailable` where they may come right the next time, `CorruptData` where the
same wrong ones came twice."""


class Source(Protocol):
    """One backend. Implementations are safe to share between threads.

    Foreign errors are translated here and nowhere else: `NotFound`, `NotAllowed`, `SourceChanged`,
    `SourceUnavailable`, `InvalidInput`.
    """

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Every object below a prefix URI in key order; one object where the URI names exactly that.

        A prefix that holds nothing yields nothing; a missing bucket or root raises `NotFound`.
        """
        ...

    def head(self, uri: str) -> ObjectVersion:
        """The object's current version. Raises `NotFound`."""
        ...

    def read_into(self, version: ObjectVersion, offset: int, into: memoryview) -> None:
        """Fill `into` with exactly the bytes [offset, offset + len(into)) of that version.

        Raises `SourceChanged` when the object is no longer that version; a short or unverifiable answer
        is never returned as success.
        """
        ...

    def checker(self, version: ObjectVersion) -> Checker | None:
        """What compares the bytes of a whole object, read by several calls, with what the source says of them; None
        where it says nothing that the reads have not shown already."""
        ...

    def close(self) -> None:
        """Give back connections and files."""
        ...
