"""Commands of the node's state machine: what its executor is to do. Frozen data.

An executor owes an event (`events.py`) for each command that starts work: `Filled` or `FillFailed` for `StartFill`,
`Evicted` for `Evict`, `Verified` for `Verify`. Until the event comes, the bytes stay reserved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import TypeAlias

from cachesvc.core.model import Counted, ExtentId, ReaderId, Stay, TierName


class Need(IntEnum):
    """The most urgent party that waits for a fill. Late requests of the fill with the lowest value are sent again
    first. Between fills of equal value the older one is first, since fills begin in the order of plans."""

    READER = 0
    PLAN = 1
    NONE = 2


@dataclass(frozen=True, slots=True)
class StartFill:
    """Fill an extent into a tier, where its bytes are reserved, from `from_tier`, or from the source where that is None.
    With a `preparer`, that process makes the bytes. `size_bytes`: what to reserve for an extent of an uneven dataset; 0:
    its size in the catalog. `need`: what waits for it as it begins."""

    extent: ExtentId
    tier: TierName
    from_tier: TierName | None = None
    preparer: ReaderId | None = None
    size_bytes: int = 0
    need: Need = field(default=Need.NONE, compare=False)


@dataclass(frozen=True, slots=True)
class FindCopy:
    """Find out whether another node has a complete copy of a prepared extent. The answer is `CopyFound`."""

    extent: ExtentId


@dataclass(frozen=True, slots=True)
class Grant:
    """Send the reader a read-only descriptor; the lease has begun. `stay`: how long the reader may hold it after it has
    read it. `from_peer`: the fill that brought the bytes to this node took them from another one. `counted`: how the
    demand was counted. `size_bytes`: what an extent of an uneven dataset takes; 0: its size in the catalog."""

    reader: ReaderId
    request: int
    extent: ExtentId
    tier: TierName
    stay: Stay = "kept"
    from_peer: bool = False
    counted: Counted = field(default="hits", compare=False)
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the reader to release an extent: its bytes are or will be `wrong`, or others need its room. `Released` follows at
    some time."""

    reader: ReaderId
    extent: ExtentId
    wrong: bool = True


@dataclass(frozen=True, slots=True)
class Refuse:
    """Tell the reader to read the extent elsewhere: room for it would have to wait for another reader."""

    reader: ReaderId
    request: int
    extent: ExtentId


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the reader that the fill it waited for failed. `code` is an `errors.py` code."""

    reader: ReaderId
    request: int
    extent: ExtentId
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Remove an extent's copy from a tier, and answer `Evicted`."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class Verify:
    """Check a copy against its checksums, for the scrub, and answer `Verified`."""

    extent: ExtentId
    tier: TierName


Command: TypeAlias = StartFill | FindCopy | Grant | Recall | Refuse | Fail | Evict | Verify
