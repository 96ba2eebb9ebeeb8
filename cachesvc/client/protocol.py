"""The interface between readers and a holder of extents: a daemon, local files, or this process itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

CLOSED = "the dataset was closed while its extents were requested; open it again"
"""The text of the CacheError that `Grants.acquire` raises after `close`."""


class Granted(NamedTuple):
    """An extent that may be read until it is released: `size_bytes` of `fd` from `offset`.

    The receiver owns `fd` and closes it. `origin` says where the bytes are: "ram" and "direct" are memory (mappable),
    "nvme" and "local" are files (read with preadv). The lifetime of the lease: with `once`, until the read that
    requested the extent ends; with `brief`, until a later read does not need it, since its room is for streaming data;
    otherwise as long as the reader likes. `from_peer`: its bytes came to this node from another node, not from the
    source. `holes`: the parts of it that are not data (`core/holes.py`); an extent with holes is never mapped. `content`:
    the digest of its bytes (`Checksums.content`); b"" where its holder has not read them.
    """

    extent: int
    fd: int
    offset: int
    size_bytes: int
    origin: str
    brief: bool = False
    once: bool = False
    from_peer: bool = False
    holes: str = ""
    content: bytes = b""


@dataclass(frozen=True, slots=True)
class Refused:
    """Not an error: the holder cannot reserve room for this extent now; read it elsewhere."""

    extent: int


class Grants(Protocol):
    """Grants the extents of one dataset by their index in its catalog. Safe to share between threads, not across a fork.

    `tests/client/test_grants_conformance.py` states what every implementation does.
    """

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """One answer per extent, in any order; a granted extent is leased until `release`, `close` or the end of the
        process.

        Raises DaemonUnavailable, DeadlineExceeded, or the typed error of the fill that failed; then no extent of this
        call stays leased. Raises CacheError after `close`.
        """
        ...

    def release(self, extents: Sequence[int]) -> None:
        """End leases. The receiver has closed the descriptors and removed its mappings."""
        ...

    def passed(self, step: int) -> None:
        """Report that everything before `step` of this rank's plan has been consumed."""
        ...

    def close(self) -> None:
        """End every lease."""
        ...
