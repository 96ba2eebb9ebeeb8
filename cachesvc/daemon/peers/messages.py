"""Messages between the daemon and its peer agent."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from cachesvc.core.model import ExtentId
from cachesvc.core.placement.place_search import Verdict
from cachesvc.core.placement.traits import ClusterWarning, Traits
from cachesvc.core.placement.view import Member, View
from cachesvc.daemon.processes.datagrams import Receiver

ANSWERING = ("present", "slow", "unreadable", "wrong")
"""The states of members that answer greetings."""


class LocateExtent(msgspec.Struct, frozen=True, tag=True):
    """Ask the agent where to read an extent. `failed`: the places that failed to give it; `late`: those that were late."""

    number: int
    extent: ExtentId
    failed: tuple[str, ...] = ()
    late: tuple[str, ...] = ()


class ExtentLocated(msgspec.Struct, frozen=True, tag=True):
    """Answer `LocateExtent`: read it from the node at HOST:PORT `address`, or, where that is "", from the source.
    `filling`: the node does not have all of it yet. `compare`: it sent wrong bytes before, and this is its probe."""

    number: int
    node: str = ""
    address: str = ""
    filling: bool = False
    compare: bool = False


class PlaceJudged(msgspec.Struct, frozen=True, tag=True):
    """Tell the agent what a fill learned of a node, or of the source."""

    verdict: Verdict


class SurveyExtents(msgspec.Struct, frozen=True, tag=True):
    """Ask the agent which extents other nodes hold, and have their owners fetch the others."""

    number: int
    extents: tuple[ExtentId, ...]


class ExtentsSurveyed(msgspec.Struct, frozen=True, tag=True):
    """Answer `SurveyExtents`: the extents that other nodes hold, and those that their owners are fetching."""

    number: int
    held: frozenset[ExtentId] = frozenset()
    coming: frozenset[ExtentId] = frozenset()


class ResidencyChanged(msgspec.Struct, frozen=True, tag=True):
    """Tell the agent which extents this node holds now, holds no more, and fills with progress since the last message.
    `anew`: it held none before."""

    filled: tuple[ExtentId, ...] = ()
    dropped: tuple[ExtentId, ...] = ()
    progressing: tuple[ExtentId, ...] = ()
    anew: bool = False


class KeepExtents(msgspec.Struct, frozen=True, tag=True):
    """Ask the daemon to fetch extents that it owns and that peers want. `later`: a prefetch that gets to them some time is
    soon enough. `without_source`: the peers cannot read the source, so the daemon fetches those that it does not own,
    too."""

    number: int
    extents: tuple[ExtentId, ...]
    later: bool = False
    without_source: bool = False


class ExtentsKept(msgspec.Struct, frozen=True, tag=True):
    """Answer `KeepExtents`: those that are resident or will be."""

    number: int
    extents: tuple[ExtentId, ...]


class BorrowExtent(msgspec.Struct, frozen=True, tag=True):
    """Ask the daemon for a descriptor of an extent that is resident or being filled, on behalf of a peer."""

    number: int
    extent: ExtentId


class LentExtent(msgspec.Struct, frozen=True, tag=True):
    """Answer `BorrowExtent`. Descriptors: the extent, and, while it is being filled, the progress of the fill; none where
    this node does not have it. `maker`: of a resident extent."""

    number: int
    size_bytes: int = 0
    digests: bytes = b""
    maker: int = 0


class NodeChanged(msgspec.Struct, frozen=True, tag=True):
    """Tell the agent what changes of the node's traits (`core/placement/traits.py`). `requests`: bytes that came from the
    source, repeated requests to it, and answers that throttle."""

    requests: tuple[int, int, int] = (0, 0, 0)
    free_bytes: int = 0
    allow: tuple[str, ...] = ()


class Leave(msgspec.Struct, frozen=True, tag=True):
    """Tell the agent that this node ends in good order. It says goodbye to the others, and ends. `for_good`: the others
    forget this node."""

    for_good: bool = False


class Withdraw(msgspec.Struct, frozen=True, tag=True):
    """Tell the agent that this node begins to leave, so it owns nothing; or that it stays, with `weight_bytes`."""

    weight_bytes: int


class HandOn(msgspec.Struct, frozen=True, tag=True):
    """Ask the agent to have another node fetch extents of a dataset from here."""

    number: int
    node: str
    dataset: str
    extents: tuple[ExtentId, ...]


class HandedOn(msgspec.Struct, frozen=True, tag=True):
    """Answer `HandOn`: a byte for each extent, as in `TakeReply`; none where the other node did not answer. `unknown`: it
    has no catalog of the dataset."""

    number: int
    taken: bytes = b""
    unknown: bool = False


class TakeExtents(msgspec.Struct, frozen=True, tag=True):
    """Ask the daemon to fetch extents of a dataset from a node that leaves."""

    number: int
    dataset: str
    extents: tuple[ExtentId, ...]


class ExtentsTaken(msgspec.Struct, frozen=True, tag=True):
    """Answer `TakeExtents`, as `HandedOn` does."""

    number: int
    taken: bytes = b""
    unknown: bool = False


class ForgetNode(msgspec.Struct, frozen=True, tag=True):
    """Ask the agent to have all present members forget one that is away."""

    number: int
    name: str


class NodeForgotten(msgspec.Struct, frozen=True, tag=True):
    """Answer `ForgetNode`. `code` and `error`: those of `core/errors.py`, 0 and "" for none. `untold`: present members that
    could not be told. `listed`: the list of members still has its address."""

    number: int
    code: int = 0
    error: str = ""
    untold: tuple[str, ...] = ()
    listed: bool = False


class FindHolders(msgspec.Struct, frozen=True, tag=True):
    """Ask the agent which extents each other node holds."""

    number: int
    extents: tuple[ExtentId, ...]


class HoldersFound(msgspec.Struct, frozen=True, tag=True):
    """Answer `FindHolders`: for each node that answered, a byte for each extent, 1 where the node holds it; and why the
    others did not answer."""

    number: int
    held: dict[str, bytes] = {}
    failed: dict[str, str] = {}


class WrongCopy(msgspec.Struct, frozen=True, tag=True):
    """A copy failed its checksums on its way between two nodes, or, where it `differs`, has other bytes than the source.
    To the agent: the copy of `node`. To the daemon: its own, as `node` says."""

    extent: ExtentId
    node: str
    differs: bool = False


@dataclass(frozen=True, slots=True)
class NodeRow:
    """A member or a refused node, for `cachesvc nodes`. `away_s`: for how long it has been away. `traits`: of its last
    greeting. `block_round_trip_us`: how long the last check of the port that sends its extents took; `bytes_per_s`: the
    rate of one read from there."""

    name: str
    address: str
    zone: str
    weight_bytes: int
    state: str
    away_s: int
    why: str
    round_trip_us: int
    block_round_trip_us: int = 0
    bytes_per_s: int = 0
    traits: Traits = field(default_factory=Traits)


@dataclass(frozen=True, slots=True)
class ClusterReport:
    """The cluster as the agent sees it. `rows` are all members, present or not. `refused`: connections that did not prove
    to be a member's."""

    me: str = ""
    settled: bool = False
    by_zone: bool = False
    members: tuple[Member, ...] = ()
    away: frozenset[str] = frozenset()
    rows: tuple[NodeRow, ...] = ()
    warnings: tuple[ClusterWarning, ...] = ()
    list_read: bool = False
    sent_bytes: int = 0
    refused: int = 0
    lookups: int = 0
    redirects: int = 0

    def view(self) -> View:
        """The view among which extents are placed."""
        return View(self.me, self.members, self.away, self.by_zone)


class ClusterState(msgspec.Struct, frozen=True, tag=True):
    """The members as the agent sees them."""

    report: ClusterReport


ToAgent: TypeAlias = (
    LocateExtent
    | SurveyExtents
    | ResidencyChanged
    | ExtentsKept
    | LentExtent
    | WrongCopy
    | PlaceJudged
    | NodeChanged
    | Leave
    | Withdraw
    | HandOn
    | ExtentsTaken
    | ForgetNode
    | FindHolders
)
ToDaemon: TypeAlias = (
    ExtentLocated
    | ExtentsSurveyed
    | KeepExtents
    | BorrowExtent
    | WrongCopy
    | ClusterState
    | NodeForgotten
    | HoldersFound
    | HandedOn
    | TakeExtents
)
receive_in_agent: Receiver[ToAgent] = Receiver(ToAgent)
receive_in_daemon: Receiver[ToDaemon] = Receiver(ToDaemon)
