"""Events of the node's state machine: what readers, jobs, operators and the executor tell it. Frozen data.

An executor owes an event for each command that starts work (`commands.py`), and `Committed` or `CommitFailed` after a
`Filled` into an NVMe tier. Until the event comes, the bytes stay reserved.

A `job` is what holds a claim: one reader, prefetch or pin. The readers of one training job are as many of these, with
one `launch`; `Demanded.job` is a `launch` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cachesvc.core.commands import Grant
from cachesvc.core.errors import TierFailed
from cachesvc.core.model import DatasetId, ExtentId, ReaderId, SourceExtent, TierName
from cachesvc.core.placement.view import View


class Event:
    """One of the events below."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class DatasetDeclared(Event):
    """A job claims a dataset: (extent, size_bytes) in catalog order. Several jobs may claim one.

    At most `quota_bytes` of it are kept, and at most `user_quota_bytes` of all datasets that the same `user` (a uid; -1:
    none) was the first to claim; None: no quota. Extents beyond a quota stream, or use room that is free.

    `gradual`: the extents, which must be distinct, are claimed a few at each `Tick`, so that a million of them delay no
    other event. Until `Claims.claimed` says so, the job names none of them.

    `sample_bytes`: the mean size of a sample; 0 where it is unknown. `made_from`: the source extent of each extent of a
    prepared dataset; () for other datasets. `uneven`: each size is the most that an extent may take, and `Filled` says what
    it takes.
    """

    job: int
    dataset: DatasetId
    extents: tuple[tuple[ExtentId, int], ...]
    user: int = -1
    quota_bytes: int | None = None
    user_quota_bytes: int | None = None
    gradual: bool = False
    sample_bytes: int = 0
    made_from: tuple[SourceExtent, ...] = ()
    uneven: bool = False


@dataclass(frozen=True, slots=True)
class JobEnded(Event):
    """A job ends, and its claims and plans with it. Its extents stay, as undeclared ones."""

    job: int


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """A rank declares its order: rows of (extent, first_step, last_step), sorted by first_step. It replaces the plan of the
    same number.

    `following` is the order of the extents in the next epoch, if it is known. The kept extents of a dataset that does
    not fit are chosen to lie evenly in that order. Plans of one `launch`, the ranks of a training job, share their
    epochs, and so do all plans with 0, which name none. The room to look ahead is shared out by `user` (a uid; -1:
    none). `local`: the job's plans of all epochs have the extents of `rows` and `following`, and no others. The node
    keeps what such plans read, whether it owns that or not, and nothing else of their dataset.
    """

    plan: int
    job: int
    rows: tuple[tuple[ExtentId, int, int], ...]
    following: Sequence[ExtentId] = ()
    launch: int = 0
    user: int = -1
    local: bool = False


@dataclass(frozen=True, slots=True)
class PlanEnded(Event):
    """A rank gave its order up or finished it."""

    plan: int


@dataclass(frozen=True, slots=True)
class Passed(Event):
    """A rank has consumed everything before `step` of its plan."""

    plan: int
    step: int


@dataclass(frozen=True, slots=True)
class Prefetched(Event):
    """A job asks for all of a dataset that it declared, as far as it can be kept. See `Node.progress`."""

    job: int
    dataset: DatasetId


@dataclass(frozen=True, slots=True)
class Demanded(Event):
    """A reader needs an extent. The answer is exactly one `Grant`, `Refuse` or `Fail`, unless the reader disconnects.

    `wait=False` is answered at once and starts nothing: `Grant` when resident, else `Refuse`. `size_bytes` is needed only
    for an extent that no job has declared. The queue serves launches round robin, so all readers of a launch have one
    place in it. `job` 0: the launch that the reader named before; a reader that named none has a place of its own.
    """

    reader: ReaderId
    request: int
    extent: ExtentId
    wait: bool = True
    size_bytes: int = 0
    job: int = 0


@dataclass(frozen=True, slots=True)
class NotGranted(Event):
    """A `Grant` could not be handed over, or its bytes are wrong: the lease ends, and the grant does not count. The
    answer is `Refuse`. With `again`, the demand is handled again instead."""

    grant: Grant
    again: bool = False


@dataclass(frozen=True, slots=True)
class Released(Event):
    """A reader releases an extent: its hold from before the restart, or else one lease."""

    reader: ReaderId
    extent: ExtentId


@dataclass(frozen=True, slots=True)
class ReaderGone(Event):
    """A reader's connection ended, and its leases, waits and holds with it."""

    reader: ReaderId


@dataclass(frozen=True, slots=True)
class HoldReported(Event):
    """A reader reports that it still maps an extent from before the daemon's restart. Its bytes count against the RAM
    budget, once for each extent. `size_bytes` 0 (a file): only its release is expected.

    `most_bytes` limits what is believed of all readers of this `user` (a uid; -1: none) together.
    """

    reader: ReaderId
    extent: ExtentId
    size_bytes: int
    user: int = -1
    most_bytes: int = 1 << 62


@dataclass(frozen=True, slots=True)
class Filled(Event):
    """A fill is complete and its bytes are verified. `from_peer`: another node gave them, not the source. `code` (an
    `errors.py` code; 0: complete) and `message`: the permanent error of the first object that is missing in it.
    `size_bytes`: what an extent of an uneven dataset takes, at most what was reserved; 0 for other extents."""

    extent: ExtentId
    tier: TierName
    from_peer: bool = False
    code: int = 0
    message: str = ""
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class FillFailed(Event):
    """A fill ended without the bytes, and its reservation ends. `code` is an `errors.py` code.

    `retry`: the cause may be temporary (a source that throttles, a full disk), so another attempt makes sense.
    """

    extent: ExtentId
    tier: TierName
    code: int
    message: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Committed(Event):
    """An NVMe copy became durable. Before this it may be granted, but not evicted."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class CommitFailed(Event):
    """An NVMe copy could not be made durable: it is recalled, and evicted as soon as its leases end. The written bytes
    may be lost although the file can still be read."""

    extent: ExtentId
    tier: TierName
    message: str
    code: int = TierFailed.code


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """The executor removed a copy; only now are its bytes free."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class Recovered(Event):
    """A tier reports what it held at start: every committed extent and its size in bytes, oldest first."""

    tier: TierName
    extents: dict[ExtentId, int]


@dataclass(frozen=True, slots=True)
class Pinned(Event):
    """An operator pins a declared dataset: what is resident of it, and what is kept later, stays until `Unpinned`. From
    here on it counts for this `user`, within these quotas (see `DatasetDeclared`), or all of it where there are none.

    `gradual`: a large dataset is pinned a few extents at each `Tick`; `Claims.settled` says when it is done.
    """

    dataset: DatasetId
    gradual: bool = False
    user: int = -1
    quota_bytes: int | None = None
    user_quota_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class QuotasChanged(Event):
    """A declared dataset has other quotas: `quota_bytes` of it are kept, and of all that a user was the first to claim, or
    pinned, what `of_users` says; None: no quota. The pin of an operator stays without any. It takes several `Tick`s."""

    dataset: DatasetId
    quota_bytes: int | None
    of_users: Mapping[int, int | None]


@dataclass(frozen=True, slots=True)
class Unpinned(Event):
    """An operator ends a pin. For a large dataset that takes several `Tick`s; `Claims.settled` says when it is done."""

    dataset: DatasetId


@dataclass(frozen=True, slots=True)
class EvictAsked(Event):
    """An operator evicts a dataset: its extents that are neither leased nor pinned. A large one is evicted a few extents at
    each `Tick`; `Claims.evicted` says when that is done.

    `extents` names its extents where no job declares the dataset, so that the node does not know them.
    """

    dataset: DatasetId
    extents: tuple[ExtentId, ...] = ()


@dataclass(frozen=True, slots=True)
class Corrupt(Event):
    """A copy failed its checksums: it is never granted again, evicted once idle, and filled again if wanted."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class FillAgain(Event):
    """Objects that are missing in a copy may be there by now: it is never granted again, evicted once idle, and filled
    again if wanted."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class Stalled(Event):
    """A tier has not answered for seconds, or answers again. Meanwhile nothing is filled into it. Comes before the
    `FillFailed` of its fills under way."""

    tier: TierName
    stalled: bool


@dataclass(frozen=True, slots=True)
class TierLost(Event):
    """A tier answers with errors: nothing is reserved in it or granted from it until `TierBack`."""

    tier: TierName


@dataclass(frozen=True, slots=True)
class TierBack(Event):
    """A lost tier works again, with the copies that it held."""

    tier: TierName


@dataclass(frozen=True, slots=True)
class Renewed(Event):
    """A lost tier has another directory, with these extents. Its copies are gone, except for files that readers have open.
    Comes before `TierBack`, once the fills and commits that were under way are answered; evictions are not answered any
    more."""

    tier: TierName
    extents: dict[ExtentId, int]


@dataclass(frozen=True, slots=True)
class Resized(Event):
    """A tier's budget changed: other files on its disk took room, or freed it."""

    tier: TierName
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Verified(Event):
    """The check that `Verify` asked for ended: the bytes are right, or could not be read. For wrong bytes, `Corrupt` comes
    before this. `looked`: the bytes were read."""

    extent: ExtentId
    tier: TierName
    looked: bool = True


@dataclass(frozen=True, slots=True)
class ViewChanged(Event):
    """The members of the cluster changed. Where the claimed data does not fit this node, only extents that it owns are
    kept."""

    view: View


@dataclass(frozen=True, slots=True)
class PeerWants(Event):
    """Another node wants an extent that no node holds, and this node owns it. Where this node keeps it, it fetches it now,
    and the other one reads it from here. `Node.will_keep` tells whether it does. `without_source`: the other node cannot
    read the source, so this node fetches whatever it has claimed and has room for. `handed_on`: the other node leaves, and
    alone holds the extent; it takes no room from what is kept here or planned."""

    extent: ExtentId
    without_source: bool = False
    handed_on: bool = False


@dataclass(frozen=True, slots=True)
class PreparerJoined(Event):
    """A process offers to prepare extents of a dataset, one at a time: a new one, or one that made no progress before.
    `ReaderGone` ends the offer."""

    preparer: ReaderId
    dataset: DatasetId


@dataclass(frozen=True, slots=True)
class CopyFound(Event):
    """Another node has a complete copy of a prepared extent, or none has. Answers `FindCopy`."""

    extent: ExtentId
    found: bool


@dataclass(frozen=True, slots=True)
class PreparerStalled(Event):
    """A preparer makes no progress, and gets no work until it joins again. Comes before the `FillFailed` of its fill."""

    preparer: ReaderId


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time passed. Owed when `Node.next_deadline()` is reached."""
