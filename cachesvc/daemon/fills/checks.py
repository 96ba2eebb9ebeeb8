"""Opening of copies, and checks against their checksums. RAM answers at once, a disk on its own lane."""

from __future__ import annotations

import errno
import logging
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from cachesvc.core import commands, events
from cachesvc.core.errors import CacheError, CorruptData, OutOfSpace, SourceUnavailable, TierFailed, from_code
from cachesvc.core.limits import VERIFY_TRIES
from cachesvc.core.model import ExtentId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.records.fair_queue import FairQueue
from cachesvc.daemon.access.tenants import NO_USER
from cachesvc.daemon.events.event import Event, record
from cachesvc.daemon.fills.pool import FillerPool
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.processes import jobs
from cachesvc.tiers.tier import Checksums, Tier

log = logging.getLogger(__name__)
CheckResult = bool | None
"""True for a good copy or one that is gone, False for a bad one, None where it could not be checked."""
OnOpened = Callable[[int, "Checksums | None"], None]
CHECKS_AT_ONCE = 4
"""Running checks of a tier: enough to keep a disk busy, and fillers keep threads for fills. The other checks wait here,
not in front of the next fill."""
MAX_DAMAGED = 100_000
"""Dropped extents whose repair is recorded."""


@dataclass(slots=True, eq=False)
class _CheckQueue:
    """The checks of a tier: a fair queue by user, and the number of running ones."""

    waiting: FairQueue[_Check] = field(default_factory=FairQueue)
    running: int = 0


@dataclass(slots=True, eq=False)
class _Check:
    """The check of one copy and its waiting callers. Until it has begun it stands in the queue of each of `users`."""

    extent: ExtentId
    tier: TierName
    queue: _CheckQueue
    waiting: list[Callable[[CheckResult], None]] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    begun: bool = False


@dataclass(eq=False)
class Checks:
    """Opens copies and checks them against their checksums. Runs on the loop's thread."""

    _node: Node
    _tiers: Mapping[TierName, Tier]
    _openers: Mapping[TierName, Lane]
    _fillers: FillerPool
    _handle: Callable[[events.Event], None]
    _suspect_tier: Callable[[TierName], None]
    unverified: dict[TierName, set[ExtentId]] = field(default_factory=lambda: defaultdict(set))
    """Copies that may have changed since the last check: from before the daemon's start or the disk's trouble."""
    committing: dict[tuple[ExtentId, TierName], Checksums] = field(default_factory=dict)
    """Checksums of copies that `Fills` is committing to a disk; their files hold none until then."""
    _damaged: set[ExtentId] = field(default_factory=set)
    """Extents that were dropped, until they are filled again."""
    _checking: dict[tuple[ExtentId, TierName], _Check] = field(default_factory=dict)
    _queues: dict[TierName, _CheckQueue] = field(default_factory=lambda: defaultdict(_CheckQueue))

    def open(
        self, extent: ExtentId, tier: TierName, then: OnOpened, otherwise: Callable[[CacheError], None]
    ) -> None:
        """Open a resident copy. `then` gets the descriptor, which it owns, and the checksums."""
        opener = self._openers.get(tier)
        if opener is not None:
            opener.submit(partial(self._tiers[tier].open, extent), lambda found: then(*found), otherwise)
            return
        try:
            found = self._tiers[tier].open(extent)
        except CacheError as error:
            otherwise(error)
            return
        then(*found)

    def verify(
        self, extent: ExtentId, tier: TierName, done: Callable[[CheckResult], None], user: int = NO_USER
    ) -> None:
        """Check a resident copy against its checksums, once for all callers meanwhile; `done` gets the result.

        A corrupt copy is dropped, and so is one whose check kills its process every time. Users take turns.
        """
        queue = self._queues[tier]
        check = self._checking.setdefault((extent, tier), _Check(extent, tier, queue))
        check.waiting.append(done)
        if not check.begun and user not in check.users:
            check.users.add(user)
            queue.waiting.append(user, check)
        self._feed(queue)

    def _feed(self, queue: _CheckQueue) -> None:
        while queue.waiting and queue.running < CHECKS_AT_ONCE:
            _, check = queue.waiting.first
            if check.begun or self._obsolete(check):
                queue.waiting.drop()
                continue
            queue.waiting.served()
            check.begun = True
            queue.running += 1
            self._verify(check, VERIFY_TRIES)

    def _obsolete(self, check: _Check) -> bool:
        """Tell whether the check was already answered, as when its tier has another directory."""
        return self._checking.get((check.extent, check.tier)) is not check

    def _verify(self, check: _Check, tries: int) -> None:
        """Open the copy and let a filler check it; use another filler where the process dies, `tries` in all."""
        opened, not_opened = partial(self._opened, check, tries), partial(self._not_opened, check)
        self.open(check.extent, check.tier, opened, not_opened)

    def _opened(self, check: _Check, tries: int, fd: int, checksums: Checksums | None) -> None:
        checksums = checksums or self.committing.get((check.extent, check.tier))
        if self._lost(check.tier):  # the read may hang, and the filler with it
            os.close(fd)
            self._done(check, False)
            return
        if checksums is not None:
            job = jobs.VerifyJob(checksums.size_bytes, checksums.digests)
            self._fillers.submit(job, (fd,), partial(self._answered, check, tries), (check.tier,))
            os.close(fd)
            return
        os.close(fd)  # the commit ended between opening the file and here
        if self._node.where(check.extent) == check.tier:
            self._verify(check, tries)
        else:
            self._done(check, True)

    def _not_opened(self, check: _Check, error: CacheError) -> None:
        if self._obsolete(check):
            self._finished(check)
            return
        gone = self._node.where(check.extent) != check.tier and not isinstance(error, CorruptData)
        if not gone and is_own_limit(error):
            self._done(check, None)
            return
        if not gone:
            self.failed(check.extent, check.tier, error.code)
        self._done(check, gone)

    def _answered(self, check: _Check, tries: int, answer: jobs.Answer) -> None:
        assert isinstance(answer, jobs.JobDone)
        if self._obsolete(check):
            self._finished(check)
        elif answer.code and self._lost(check.tier):  # the error is the tier's, not the copy's
            self._done(check, False)
        elif answer.retry and tries > 1:  # the process died, which proves nothing about the bytes
            self._verify(check, tries - 1)
        elif answer.code == OutOfSpace.code or (answer.code == SourceUnavailable.code and not answer.lost):
            log.warning("an extent cannot be checked", extra={"tier": check.tier, "error": answer.message})
            self._done(check, None)
        elif answer.code:
            self.failed(check.extent, check.tier, answer.code)
            self._done(check, False)
        else:
            self.unverified[check.tier].discard(check.extent)
            self._done(check, True)

    def _done(self, check: _Check, good: CheckResult) -> None:
        """Answer all callers."""
        if not self._obsolete(check):
            del self._checking[(check.extent, check.tier)]
            for each in check.waiting:
                each(good)
        self._finished(check)

    def _finished(self, check: _Check) -> None:
        check.queue.running -= 1
        self._feed(check.queue)

    def failed(self, extent: ExtentId, tier: TierName, code: int) -> None:
        """Drop a copy that is corrupt or cannot be read, unless its whole tier is lost."""
        if code == TierFailed.code:
            self._suspect_tier(tier)
            if self._lost(tier):
                return
        kind = "unreadable" if code == TierFailed.code else "corrupt"
        record(Event(kind, tier=tier, extent=extent.hex(), error=type(from_code(code, "")).__name__))
        if len(self._damaged) < MAX_DAMAGED:
            self._damaged.add(extent)
        self._handle(events.Corrupt(extent, tier))

    def repaired(self, extent: ExtentId) -> bool:
        """Tell whether the last copy of an extent that is filled now was dropped as damaged; forget it."""
        damaged = extent in self._damaged
        self._damaged.discard(extent)
        return damaged

    def _lost(self, tier: TierName) -> bool:
        return self._node.policy.tiers[tier].lost

    def suspect(self, tier: TierName, error: CacheError) -> None:
        """Have a tier probed after a failed call, unless the error says nothing about the tier."""
        if isinstance(error, TierFailed) and not is_own_limit(error):
            self._suspect_tier(tier)

    def mark_unverified(self, extent: ExtentId) -> None:
        """Check an extent's copies on disks before their next grant, since a reader found wrong bytes."""
        for tier in self._openers:
            copy = self._node.copies.find(extent, self._node.policy.tiers[tier])
            if copy is not None and copy.usable:
                self.unverified[tier].add(extent)

    def scrub(self, command: commands.Verify) -> None:
        """Execute `Verify`: check a copy, which the core chose; `Verified` follows."""

        def checked(good: CheckResult) -> None:
            self._handle(events.Verified(command.extent, command.tier, good is not None))

        self.verify(command.extent, command.tier, checked)

    def renewed(self, tier: TierName) -> None:
        """End the checks of a tier that has another directory now: they say nothing about that one."""
        self._queues[tier] = _CheckQueue()
        for key in [key for key in self._checking if key[1] == tier]:
            for each in self._checking.pop(key).waiting:
                each(True)

    def tier_back(self, tier: TierName) -> None:
        """Check every copy in a tier again before its next grant, since its disk was in trouble."""
        self.unverified[tier] = self._node.resident_in(tier)


def is_own_limit(error: CacheError) -> bool:
    """Tell whether the daemon ran out of descriptors or memory, which says nothing about the copy."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
