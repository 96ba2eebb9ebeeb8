"""What the node's state machine is told, and what it asks for: frozen data both ways.

Events come from readers, jobs, operators and from the executor that runs the commands. An executor owes an
answer to each command that starts work: `Filled` or `FillFailed` to `StartFill`, `Evicted` to `Evict`,
`Verified` to `Verify`, and `Committed` or `CommitFailed` after a `Filled` into an NVMe tier. Until it answers,
the bytes stay reserved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from cachesvc.core.commands import Grant
from cachesvc.core.errors import TierFailed
from cachesvc.core.model import DatasetId, ExtentId, ReaderId, TierName


@dataclass(frozen=True, slots=True)
class DatasetDeclared:
    """A job claims a dataset: (extent, size_bytes) in catalog order. Several jobs may claim one.

    Of it at most `quota_bytes` are kept, and of all that the same `user` (a uid; -1: nobody's) was the first to
    claim at most `user_quota_bytes`; None: no quota. What exceeds them streams, or lies in room that is free.

    `gradual`: the extents, which must be distinct, are taken up a few at each `Tick`, so that a million of them stop
    nobody. Until `Claims.claimed` says so, the job names none of them.
    """

    job: int
    dataset: DatasetId
    extents: tuple[tuple[ExtentId, int], ...]
    user: int = -1
    quota_bytes: int | None = None
    user_quota_bytes: int | None = None
    gradual: bool = False


@dataclass(frozen=True, slots=True)
class JobEnded:
    """The job's claims and plans end; its extents stay, as undeclared ones."""

    job: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A rank's order: (extent, first_step, last_step) sorted by first_step; replaces that plan's number.

    `following` is the order of the extents in the epoch after it, where that is known: what is kept of a dataset
    that does not fit is chosen to lie evenly in it. `passed` is the step before which a daemon that we took over
    from saw everything consumed. Plans of one `launch`, the ranks of a job, have their epochs together; 0: one that
    says nothing of its job has them with all others that say nothing. The room to look ahead is shared out by `user`
    (a uid; -1: nobody's).
    """

    plan: int
    job: int
    rows: tuple[tuple[ExtentId, int, int], ...]
    following: Sequence[ExtentId] = ()
    passed: int = 0
    launch: int = 0
    user: int = -1


@dataclass(frozen=True, slots=True)
class PlanEnded:
    """The rank gave its order up or came to its end."""

    plan: int


@dataclass(frozen=True, slots=True)
class Passed:
    """Everything before `step` of this plan has been consumed."""

    plan: int
    step: int


@dataclass(frozen=True, slots=True)
class Prefetched:
    """A job asks for all of a dataset that it declared, as far as it can be kept. See `Node.progress`."""

    job: int
    dataset: DatasetId


@dataclass(frozen=True, slots=True)
class Demanded:
    """A reader needs an extent. Answered by exactly one `Grant`, `Refuse` or `Fail`, unless the reader goes.

    `wait=False` is answered at once and starts nothing: `Grant` when resident, else `Refuse`.
    `size_bytes` is needed only for an extent that no job has declared. Jobs take turns, so readers of one `job` have one
    turn among them. 0: the job that the reader named before, or, where it named none, a turn of its own.
    """

    reader: ReaderId
    request: int
    extent: ExtentId
    wait: bool = True
    size_bytes: int = 0
    job: int = 0


@dataclass(frozen=True, slots=True)
class NotGranted:
    """What a `Grant` told could not be handed over, or its bytes are wrong: the lease ends, and it does not count. Answered
    as the demand was; with `Refuse`, unless the reader is to be granted it `again`."""

    grant: Grant
    again: bool = False


@dataclass(frozen=True, slots=True)
class Released:
    """A reader gives back one lease of an extent (one that it held from before our restart goes first)."""

    reader: ReaderId
    extent: ExtentId


@dataclass(frozen=True, slots=True)
class ReaderGone:
    """A reader's connection ended: all its leases, waits and held bytes end with it."""

    reader: ReaderId


@dataclass(frozen=True, slots=True)
class HoldReported:
    """A reader still maps an extent from before our restart: the bytes count against the RAM budget, once an extent. No
    bytes (a file): only its release is expected.

    `most_bytes`: of what readers of this `user` (a uid; -1: nobody's) say so together, no more is believed. None: another
    daemon has believed it, and said so in a takeover.
    """

    reader: ReaderId
    extent: ExtentId
    size_bytes: int
    user: int = -1
    most_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Leased:
    """A reader was granted an extent from a tier by the daemon that we took over from: a lease of the copy that
    came with it, or, where none did, `HoldReported`."""

    reader: ReaderId
    extent: ExtentId
    tier: TierName
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Filled:
    """A fill is complete and its bytes are verified. `from_peer`: another node had them, the source gave none. `code`
    (of errors.py; 0: nothing) and `message`: what the first object that is missing in it failed with, for good."""

    extent: ExtentId
    tier: TierName
    from_peer: bool = False
    code: int = 0
    message: str = ""


@dataclass(frozen=True, slots=True)
class FillFailed:
    """A fill ended without the bytes, and its reservation is void. `code` is an `errors.py` code.

    `retry`: the cause may pass (a source that throttles, a full disk), so it is worth another attempt.
    """

    extent: ExtentId
    tier: TierName
    code: int
    message: str
    retry: bool = False


@dataclass(frozen=True, slots=True)
class Committed:
    """An NVMe extent became durable. Before this it may be granted, but not evicted."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class CommitFailed:
    """An NVMe extent could not be made durable: the copy is dropped as soon as its leases end, and its readers are asked
    for it. What was written may be gone although the file can still be read."""

    extent: ExtentId
    tier: TierName
    message: str
    code: int = TierFailed.code


@dataclass(frozen=True, slots=True)
class Evicted:
    """The executor gave the bytes back; only now are they free."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a tier held at start: everything committed and its size in bytes, oldest first."""

    tier: TierName
    extents: dict[ExtentId, int]


@dataclass(frozen=True, slots=True)
class Pinned:
    """What is resident of a declared dataset, and what it comes to keep, stays until `Unpinned`: within these quotas (see
    `DatasetDeclared`) of the `user` for whom it counts from here on, and all of it where there are none.

    `gradual`: from when `Claims.settled` says so; a large dataset is pinned a few extents at each `Tick`.
    """

    dataset: DatasetId
    gradual: bool = False
    user: int = -1
    quota_bytes: int | None = None
    user_quota_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Unpinned:
    """Ends `Pinned`. Of a large dataset that takes several `Tick`s; `Claims.settled` says when it is done."""

    dataset: DatasetId


@dataclass(frozen=True, slots=True)
class EvictAsked:
    """An operator drops a dataset: what is neither leased nor pinned goes now. A large one goes a few extents at each
    `Tick`; `Claims.evicted` says when that is done.

    `extents` names them where no job declares the dataset and the node cannot know which they are.
    """

    dataset: DatasetId
    extents: tuple[ExtentId, ...] = ()


@dataclass(frozen=True, slots=True)
class Corrupt:
    """A copy failed its checksums: never granted again, dropped once unused, filled again if wanted."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class FillAgain:
    """Objects are missing in a copy, and may be there by now: never granted again, dropped once unused, filled again if
    wanted."""

    extent: ExtentId
    tier: TierName


@dataclass(frozen=True, slots=True)
class Stalled:
    """A tier has not answered for seconds, or does again: meanwhile nothing is filled into it. Comes before what it keeps
    waiting is answered with `FillFailed`."""

    tier: TierName
    stalled: bool


@dataclass(frozen=True, slots=True)
class TierLost:
    """A tier answers with errors: nothing is reserved in it or granted from it until `TierBack`."""

    tier: TierName


@dataclass(frozen=True, slots=True)
class TierBack:
    """A lost tier works again, with what it held."""

    tier: TierName


@dataclass(frozen=True, slots=True)
class Renewed:
    """A lost tier has another directory: what it held is gone, files that readers have open apart, and this is
    what it holds now. Comes when fills and commits that it had under way are answered, before `TierBack`;
    evictions are not answered any more."""

    tier: TierName
    extents: dict[ExtentId, int]


@dataclass(frozen=True, slots=True)
class Resized:
    """A tier's budget changed: other people's files took room on its disk, or gave it back."""

    tier: TierName
    budget_bytes: int


@dataclass(frozen=True, slots=True)
class Verified:
    """The check that `Verify` asked for ended: the bytes are right, or nothing could be said about them.
    A copy that is wrong is `Corrupt`, before this. `looked`: somebody could look."""

    extent: ExtentId
    tier: TierName
    looked: bool = True


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed; owed when `Node.next_deadline()` is reached."""


Event: TypeAlias = (
    DatasetDeclared
    | JobEnded
    | Planned
    | PlanEnded
    | Passed
    | Prefetched
    | Demanded
    | NotGranted
    | Released
    | ReaderGone
    | HoldReported
    | Leased
    | Filled
    | FillFailed
    | Committed
    | CommitFailed
    | Evicted
    | Recovered
    | Pinned
    | Unpinned
    | EvictAsked
    | Corrupt
    | FillAgain
    | Stalled
    | TierLost
    | TierBack
    | Renewed
    | Resized
    | Verified
    | Tick
)
