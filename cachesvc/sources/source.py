"""The Protocol of a storage backend: S3, POSIX or NFS files, anything that fsspec opens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Protocol, TypeVar, runtime_checkable

from cachesvc.core.model import ObjectVersion

_T = TypeVar("_T")
Checker = Callable[[Iterable[memoryview]], None]
"""Compares all bytes of an object, given in order. Raises `SourceUnavailable` when they differ, since the next read may
bring the right ones, and `CorruptData` when the same wrong bytes came twice."""


OnReceived = Callable[[int], None]
"""Told by a read, on its thread, how many bytes of `into` have come; 0 when a try begins. They are verified only when the
read has returned."""


def ignore_received(count: int) -> None:
    """Do nothing; the default of `Source.read_into`."""


class Source(Protocol):
    """One storage backend. Implementations are thread-safe, and translate all errors of their libraries: to `NotFound`,
    `NotAllowed`, `SourceChanged`, `SourceUnavailable`, `InvalidInput`.
    """

    def list(self, prefix: str) -> Iterator[ObjectVersion]:
        """Yield every object below a prefix URI in key order, or the one object that the URI names exactly.

        Yields nothing for an empty prefix. Raises `NotFound` for a missing bucket or root.
        """
        ...

    def head(self, uri: str) -> ObjectVersion:
        """Return the object's current version. Raises `NotFound`."""
        ...

    def read_into(
        self, version: ObjectVersion, offset: int, into: memoryview, received: OnReceived = ignore_received
    ) -> None:
        """Fill `into` with exactly the bytes [offset, offset + len(into)) of that version.

        A source that receives over a network may tell `received` how far it is. Raises `SourceChanged` when the object is
        no longer that version, and a typed error for a response that is short or cannot be verified.
        """
        ...

    def checker(self, version: ObjectVersion) -> Checker | None:
        """Return a function that compares the bytes of a whole object, read by several calls, with a checksum of the
        source; None when the source states none, or its transport detects flipped bits."""
        return None

    def close(self) -> None:
        """Close connections and files; nothing is held where a source does not say otherwise."""
        return None


class Send(Protocol):
    """Calls a function that sends one request, and calls it again while the source is unavailable."""

    def __call__(self, request: Callable[[], _T], /) -> _T: ...


def send_once(request: Callable[[], _T], /) -> _T:
    """Send a request without retries; a `Send`."""
    return request()


@runtime_checkable
class Paged(Protocol):
    """A source whose listings take many requests, each of which is retried by itself."""

    def list_by(self, prefix: str, send: Send) -> Iterator[ObjectVersion]:
        """List as `Source.list`, with `send` for each request."""
        ...
