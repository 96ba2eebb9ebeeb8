"""Copies opened and checked for those who asked. RAM answers at once; a disk is waited for on its own lane."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from cachesvc.core import events
from cachesvc.core.errors import CacheError, CorruptData, OutOfSpace, SourceUnavailable, TierFailed
from cachesvc.core.model import ExtentId, TierName
from cachesvc.core.node.node import Node
from cachesvc.core.records.fair_queue import FairQueue
from cachesvc.daemon.access.tenants import NOBODY
from cachesvc.daemon.fills.pool import Fillers
from cachesvc.daemon.loop.lanes import Lane
from cachesvc.daemon.processes import jobs
from cachesvc.tiers.tier import Checksums, Tier

log = logging.getLogger(__name__)
VERIFY_TRIES = 3
Good = bool | None
"""Whether nothing wrong was found; None where nobody could look."""
Opened = Callable[[int, "Checksums | None"], None]
AT_ONCE = 4
"""Checks at work in a tier: they keep a disk busy, and leave fillers threads for fills. A reader that doubts all that a
disk holds has it all checked: that waits here, not before everybody's next fill."""


@dataclass(slots=True, eq=False)
class _Line:
    """A tier's checks to come, users in turn, and how many are at work."""

    waiting: FairQueue[_Check] = field(default_factory=FairQueue)
    at_work: int = 0


@dataclass(slots=True, eq=False)
class _Check:
    """Of one copy, and who waits for it: in the lines of these users, until it has begun."""

    extent: ExtentId
    tier: TierName
    line: _Line
    waiting: list[Callable[[Good], None]] = field(default_factory=list)
    users: set[int] = field(default_factory=set)
    begun: bool = False


class Checks:
    """Opens copies and checks them against their checksums. Runs on the loop's thread."""

    def __init__(
        self,
        node: Node,
        tiers: Mapping[TierName, Tier],
        openers: Mapping[TierName, Lane],
        fillers: Fillers,
        handle: Callable[[events.Event], None],
        failing: Callable[[TierName], None],
    ) -> None:
        self._node = node
        self._tiers = tiers
        self._openers = openers
        self._fillers = fillers
        self._handle = handle
        self._failing = failing
        self.unverified: dict[TierName, set[ExtentId]] = {tier: set() for tier in node.policy.tiers}
        """Copies whose bytes somebody else may have changed since we checked them: from before our start, or
        from before their disk's trouble."""
        self.committing: dict[tuple[ExtentId, TierName], Checksums] = {}
        """What `Fills` is committing to a disk: its file tells no checksums before that is done."""
        self._checking: dict[tuple[ExtentId, TierName], _Check] = {}
        self._lines = {tier: _Line() for tier in node.policy.tiers}

    def open(
        self, extent: ExtentId, tier: TierName, then: Opened, otherwise: Callable[[CacheError], None]
    ) -> None:
        """Open a resident copy; `then` owns the descriptor."""
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
        self, extent: ExtentId, tier: TierName, done: Callable[[Good], None], user: int = NOBODY
    ) -> None:
        """Check one resident copy against its checksums, once for all who ask meanwhile; a corrupt copy is
        dropped, and so is one whose check ends its process every time. `done` is called once, with what was
        found. Users take turns; a copy that several wait for stands in the line of each."""
        line = self._lines[tier]
        check = self._checking.setdefault((extent, tier), _Check(extent, tier, line))
        check.waiting.append(done)
        if not check.begun and user not in check.users:
            check.users.add(user)
            line.waiting.append(user, check)
        self._feed(line)

    def _feed(self, line: _Line) -> None:
        while line.waiting and line.at_work < AT_ONCE:
            _, check = line.waiting.first
            if check.begun or self._ended(check):
                line.waiting.drop()
                continue
            line.waiting.served()
            check.begun = True
            line.at_work += 1
            self._verify(check, VERIFY_TRIES)

    def _ended(self, check: _Check) -> bool:
        """Its tier has another directory, or all is said."""
        return self._checking.get((check.extent, check.tier)) is not check

    def _verify(self, check: _Check, tries: int) -> None:
        """Open the copy and have a filler look at it, and another where that ends over it: `tries` of them."""
        opened, not_opened = partial(self._opened, check, tries), partial(self._not_opened, check)
        self.open(check.extent, check.tier, opened, not_opened)

    def _opened(self, check: _Check, tries: int, fd: int, checksums: Checksums | None) -> None:
        checksums = checksums or self.committing.get((check.extent, check.tier))
        if self._lost(check.tier):  # it may hang: no filler is to wait for it
            os.close(fd)
            self._done(check, False)
            return
        if checksums is not None:
            digests = jobs.pack_digests(checksums.digests)
            job = partial(jobs.Verify, size_bytes=checksums.size_bytes, digests=digests)
            self._fillers.submit(job, (fd,), partial(self._answered, check, tries), (check.tier,))
            os.close(fd)
            return
        os.close(fd)  # its commit ended meanwhile
        if self._node.where(check.extent) == check.tier:
            self._verify(check, tries)
        else:
            self._done(check, True)

    def _not_opened(self, check: _Check, error: CacheError) -> None:
        if self._ended(check):
            self._over(check)
            return
        gone = self._node.where(check.extent) != check.tier and not isinstance(error, CorruptData)
        if not gone and short_of_descriptors(error):
            self._done(check, None)
            return
        if not gone:
            self.failed(check.extent, check.tier, error.code)
        self._done(check, gone)

    def _answered(self, check: _Check, tries: int, answer: jobs.Answer) -> None:
        assert isinstance(answer, jobs.Done)
        if self._ended(check):
            self._over(check)
        elif answer.code and self._lost(check.tier):  # it is the tier that cannot be read
            self._done(check, False)
        elif answer.retry and tries > 1:  # the process ended, which says nothing about the bytes
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

    def _done(self, check: _Check, good: Good) -> None:
        """Say what was found to all who wait for it."""
        if not self._ended(check):
            del self._checking[(check.extent, check.tier)]
            for each in check.waiting:
                each(good)
        self._over(check)

    def _over(self, check: _Check) -> None:
        check.line.at_work -= 1
        self._feed(check.line)

    def failed(self, extent: ExtentId, tier: TierName, code: int) -> None:
        """A copy is wrong or cannot be read: it is dropped, unless it is its whole tier that cannot be read."""
        if code == TierFailed.code:
            self._failing(tier)
            if self._lost(tier):
                return
        what = "an extent that cannot be read" if code == TierFailed.code else "a corrupt extent"
        log.error(f"{what} is dropped", extra={"extent": extent.hex(), "tier": tier})
        self._handle(events.Corrupt(extent, tier))

    def _lost(self, tier: TierName) -> bool:
        return self._node.policy.tiers[tier].lost

    def suspect(self, tier: TierName, error: CacheError) -> None:
        """A call of a tier failed: look into it, unless the error says nothing about the tier."""
        if isinstance(error, TierFailed) and not short_of_descriptors(error):
            self._failing(tier)

    def doubt(self, extent: ExtentId) -> None:
        """A reader found wrong bytes in a file: what disks hold of the extent is checked before its next grant."""
        for tier in self._openers:
            copy = self._node.copies.find(extent, self._node.policy.tiers[tier])
            if copy is not None and copy.usable:
                self.unverified[tier].add(extent)

    def renewed(self, tier: TierName) -> None:
        """A tier has another directory: what is being checked in the old one says nothing about this one."""
        self._lines[tier] = _Line()
        for key in [key for key in self._checking if key[1] == tier]:
            for each in self._checking.pop(key).waiting:
                each(True)

    def came_back(self, tier: TierName) -> None:
        """A disk that was in trouble: everything on it is checked again before its next grant."""
        self.unverified[tier] = self._node.resident_in(tier)


def short_of_descriptors(error: CacheError) -> bool:
    """Our own limits, which say nothing about the copy."""
    cause = error.__cause__
    return isinstance(cause, OSError) and cause.errno in (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
