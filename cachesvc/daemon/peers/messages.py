"""Messages between the daemon and its peer agent. Several extents are one string of hex ids, `ID_DIGITS` each."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from cachesvc.core.model import ExtentId

ID_DIGITS = 32


@dataclass(frozen=True, slots=True)
class LocateExtent:
    """Ask the agent where to read an extent. `failed`: the nodes, separated by spaces, that failed to give it."""

    kind: ClassVar[str] = "locate"
    number: int
    extent: str
    failed: str = ""


@dataclass(frozen=True, slots=True)
class ExtentLocated:
    """Answer `LocateExtent`: read it from the node at HOST:PORT `address`, or, where that is "", from the source."""

    kind: ClassVar[str] = "located"
    number: int
    node: str = ""
    address: str = ""


@dataclass(frozen=True, slots=True)
class SurveyExtents:
    """Ask the agent which extents other nodes hold, and have their owners fetch the others."""

    kind: ClassVar[str] = "survey"
    number: int
    extents: str


@dataclass(frozen=True, slots=True)
class ExtentsSurveyed:
    """Answer `SurveyExtents`: the extents that other nodes hold, and those that their owners are fetching."""

    kind: ClassVar[str] = "surveyed"
    number: int
    held: str
    coming: str


@dataclass(frozen=True, slots=True)
class ResidencyChanged:
    """Tell the agent which extents this node holds now, holds no more, and fills with progress since the last message.
    `anew`: it held none before."""

    kind: ClassVar[str] = "residency"
    filled: str = ""
    dropped: str = ""
    progressing: str = ""
    anew: bool = False


@dataclass(frozen=True, slots=True)
class KeepExtents:
    """Ask the daemon to fetch extents that it owns and that peers want. `later`: a prefetch that gets to them some time is
    soon enough."""

    kind: ClassVar[str] = "keep"
    number: int
    extents: str
    later: bool = False


@dataclass(frozen=True, slots=True)
class ExtentsKept:
    """Answer `KeepExtents`: those that are resident or will be."""

    kind: ClassVar[str] = "kept"
    number: int
    extents: str


@dataclass(frozen=True, slots=True)
class BorrowExtent:
    """Ask the daemon for a descriptor of an extent that is resident or being filled, on behalf of a peer."""

    kind: ClassVar[str] = "borrow"
    number: int
    extent: str


@dataclass(frozen=True, slots=True)
class LentExtent:
    """Answer `BorrowExtent`. Descriptors: the extent, and, while it is being filled, the progress of the fill; none where
    this node does not have it."""

    kind: ClassVar[str] = "lent"
    number: int
    size_bytes: int = 0
    digests: str = ""


@dataclass(frozen=True, slots=True)
class WrongCopy:
    """A copy failed its checksums on its way between two nodes. To the agent: the copy of `node`. To the daemon: its own,
    and `node` is ""."""

    kind: ClassVar[str] = "wrong copy"
    extent: str
    node: str = ""


@dataclass(frozen=True, slots=True)
class ClusterState:
    """The members as the agent sees them, as JSON (`ClusterReport`)."""

    kind: ClassVar[str] = "cluster"
    report: str


OfPeers: TypeAlias = (
    LocateExtent
    | ExtentLocated
    | SurveyExtents
    | ExtentsSurveyed
    | ResidencyChanged
    | KeepExtents
    | ExtentsKept
    | BorrowExtent
    | LentExtent
    | WrongCopy
    | ClusterState
)


def pack_ids(extents: Iterable[ExtentId]) -> str:
    """Extent ids as one string."""
    return "".join(extent.hex() for extent in extents)


def unpack_ids(text: str) -> list[ExtentId]:
    """The inverse of `pack_ids`. Raises ValueError for anything else."""
    if len(text) % ID_DIGITS:
        raise ValueError("not a list of extents")
    return [ExtentId(bytes.fromhex(text[at : at + ID_DIGITS])) for at in range(0, len(text), ID_DIGITS)]
