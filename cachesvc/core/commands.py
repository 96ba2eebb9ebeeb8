"""Commands of the node's state machine: what its executor is to do. Frozen data.

An executor owes an event (`events.py`) for each command that starts work: `Filled` or `FillFailed` for `StartFill`,
`Evicted` for `Evict`, `Verified` for `Verify`. Until the event comes, the bytes stay reserved.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from cachesvc.core.model import Counted, ExtentId, ReaderId, Stay, TierName


@dataclass(frozen=True, slots=True)
class StartFill:
    """Bring an extent into a tier, where its bytes are reserved; `from_tier` None is the source."""

    extent: ExtentId
    tier: TierName
    from_tier: TierName | None = None


@dataclass(frozen=True, slots=True)
class Grant:
    """Hand the reader a read-only descriptor; the lease has begun. `stay`: how long the reader may hold it when it has
    read it. `from_peer`: the fill that brought the bytes to this node had them from another one. `counted`: as what."""

    reader: ReaderId
    request: int
    extent: ExtentId
    tier: TierName
    stay: Stay = "kept"
    from_peer: bool = False
    counted: Counted = field(default="hits", compare=False)


@dataclass(frozen=True, slots=True)
class Recall:
    """Ask the reader for what it was granted of an extent: its bytes are wrong, or will be; or others need its room.
    `Released` follows, at some time."""

    reader: ReaderId
    extent: ExtentId
    wrong: bool = True


@dataclass(frozen=True, slots=True)
class Refuse:
    """Read it elsewhere: it cannot be reserved now without waiting for another reader."""

    reader: ReaderId
    request: int
    extent: ExtentId


@dataclass(frozen=True, slots=True)
class Fail:
    """The fill that the reader waited for failed. `code` is an `errors.py` code."""

    reader: ReaderId
    request: int
    extent: ExtentId
    code: int
    message: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Give an extent's bytes in a tier back and answer `Evicted`."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class Verify:
    """The scrub's turn: check a copy against its checksums and answer `Verified`."""

    extent: ExtentId
    tier: TierName


Command: TypeAlias = StartFill | Grant | Recall | Refuse | Fail | Evict | Verify
