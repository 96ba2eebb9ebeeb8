"""The seam between readers and whoever holds extents: a daemon, a local file, or this process itself.

Both ends of it live in different packages (`client` and the loader), so it stands here, above neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class Granted(NamedTuple):
    """An extent that may be read until it is released: `size_bytes` of `fd` from `offset`.

    The receiver owns `fd` and closes it. `origin` says where the bytes come from: "ram" and "direct" are
    memory (mappable), "nvme" and "local" are files (read with preadv). `brief`: to be released when a later read does
    not touch it, since its room is for data that streams; `once`: right after the read that asked for it. `from_peer`:
    its bytes came to this node from another one, not from the source. `holes`: what of it is no data (`core/holes.py`);
    such an extent is never mapped.
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


@dataclass(frozen=True, slots=True)
class Refused:
    """Not an error: the holder cannot reserve room for this extent now; read it elsewhere."""

    extent: int


class Grants(Protocol):
    """Hands out the extents of one dataset by their index in its catalog. Safe to share between threads; not
    across a fork: a child calls `close` (which then only closes descriptors) and connects anew."""

    def acquire(self, extents: Sequence[int], timeout_s: float) -> list[Granted | Refused]:
        """One answer per extent, in any order; the extent is leased until `release`, `close` or death.

        Raises DaemonUnavailable, DeadlineExceeded, or the typed error of the fill that failed; then nothing
        of this call stays leased.
        """
        ...

    def release(self, extents: Sequence[int]) -> None:
        """Give leases back. The receiver has closed the descriptors and removed its mappings."""
        ...

    def passed(self, step: int) -> None:
        """Everything before `step` of this rank's plan has been consumed."""
        ...

    def close(self) -> None:
        """Give back everything."""
        ...
